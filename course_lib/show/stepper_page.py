"""Style, controls and script of the stepper: text that goes into the output, no network, no library."""

from course_lib.show.looks import css

SCOPE = ".rtd-stepper"

STYLE = f"""<style>
{SCOPE}{{max-width:900px;font-family:var(--jp-ui-font-family,system-ui,sans-serif)}}
{SCOPE} svg{{display:block;width:100%;height:auto}}
{css(SCOPE)}
{SCOPE} .strong{{font-weight:600}}
{SCOPE} .tip{{fill:var(--arrow)}}
{SCOPE} .solid{{stroke-dasharray:none}}
{SCOPE} .label{{paint-order:stroke;stroke:var(--jp-layout-color0,Canvas);stroke-width:4px}}
{SCOPE} .only-now{{display:none}}
{SCOPE} .only-now.now{{display:inline}}
{SCOPE} [data-step]{{cursor:pointer}}
{SCOPE} .past{{opacity:.5}}
{SCOPE} .later{{opacity:.13}}
{SCOPE} .now .arrow,{SCOPE} .now .lost{{stroke-width:4px}}
{SCOPE} rect.now{{stroke:currentColor;stroke-width:2px}}
{SCOPE} text.now{{font-weight:700}}
{SCOPE} .controls{{display:flex;align-items:center;gap:8px;margin:4px 0}}
{SCOPE} .controls[hidden]{{display:none}}
{SCOPE} .controls input{{flex:1;min-width:80px;height:24px;accent-color:var(--jp-brand-color1,#1976d2)}}
{SCOPE} .controls button{{font:inherit;color:inherit;background:none;border:1px solid currentColor;
border-radius:4px;min-width:32px;min-height:28px;cursor:pointer}}
{SCOPE} .controls :focus-visible{{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:2px}}
{SCOPE} output{{min-width:72px;text-align:right;font-size:14px;font-variant-numeric:tabular-nums}}
{SCOPE} p.caption{{min-height:3em;margin:2px 0;font-size:15px;line-height:1.5}}
</style>"""

# JupyterLab would take the arrow keys as "next cell": the attribute on the input itself keeps them here.
CONTROLS = """<div class="controls"{hidden}>
<button type="button" data-lm-suppress-shortcuts="true" value="-1"
aria-label="one step back" title="one step back">◀</button>
<input type="range" min="0" max="{last}" step="1" value="0" data-lm-suppress-shortcuts="true"
aria-label="step through the picture (arrow keys)" title="drag, or use the arrow keys">
<button type="button" data-lm-suppress-shortcuts="true" value="1"
aria-label="one step on" title="one step on">▶</button>
<output></output></div><p class="caption" aria-live="polite"></p>"""

SCRIPT = """(function () {
  // Runs where the picture is shown, without a kernel: swaps the still for the live picture and its controls.
  var root = document.currentScript.parentNode, data = __DATA__;
  var stage = root.querySelector(".stage"), last = data.captions.length - 1, shown = -1;
  root.insertAdjacentHTML("afterbegin", data.style);
  root.insertAdjacentHTML("beforeend", data.controls);
  var slider = root.querySelector("input"), place = root.querySelector("output");
  var caption = root.querySelector("p.caption");
  function go(step) {
    step = Math.max(0, Math.min(last, step));
    var frame = Math.min(step, data.frames.length - 1);
    if (frame !== shown) { stage.innerHTML = data.frames[frame]; shown = frame; }
    stage.querySelectorAll("[data-step]").forEach(function (shape) {
      var own = Number(shape.dataset.step);
      shape.classList.toggle("now", step > 0 && own === step);
      shape.classList.toggle("later", step > 0 && own > step);
      shape.classList.toggle("past", step > 0 && own < step);
    });
    slider.value = step;
    slider.setAttribute("aria-valuetext", data.captions[step]);
    place.textContent = step + " / " + last;
    caption.textContent = data.captions[step];
  }
  slider.addEventListener("input", function () { go(Number(slider.value)); });
  root.querySelectorAll("button").forEach(function (button) {
    button.addEventListener("click", function (event) {
      go(Number(slider.value) + Number(button.value));
      if (event.detail) { slider.focus({preventScroll: true}); }  // after a mouse click the arrow keys work
    });
  });
  stage.addEventListener("click", function (event) {
    var shape = event.target.closest("[data-step]");
    if (shape) { go(Number(shape.dataset.step)); slider.focus({preventScroll: true}); }
  });
  go(0);
})();"""
