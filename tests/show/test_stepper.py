"""The stepper as a piece for other pictures, and the small helpers."""

import doctest
import json
import re
import subprocess
import sys

import pytest

from course_lib import show
from course_lib.show import _HOME, Stepper, lanes, words
from course_lib.show.looks import LOOKS


def data_of(html):
    """The object that the script holds."""
    start = html.index("data = ") + len("data = ")
    return json.JSONDecoder().raw_decode(html[start:])[0]


def test_frames_and_captions_travel_unchanged():
    frames = ["<svg>0</svg>", "<svg>é ✔</svg>"]
    stepper = Stepper(frames, ["all", "first"], b"png", 'a "ring"')
    data = data_of(stepper.html)
    assert data["frames"] == frames
    assert data["captions"] == ["all", "first"]
    assert 'max="1"' in data["controls"]
    assert 'alt="a &quot;ring&quot;"' in stepper.html
    assert repr(stepper) == "all\nfirst"


def test_arrow_keys_stay_with_the_slider():
    controls = data_of(Stepper(["<svg/>"], ["a", "b"], b"", "x").html)["controls"]
    assert 'data-lm-suppress-shortcuts="true"' in re.search(r"<input [^>]*>", controls)[0]
    assert re.search(r"<input [^>]*aria-label", controls)


@pytest.mark.parametrize(("frames", "captions"), [(["a", "b"], ["x", "y", "z"]), ([], ["x"]), (["a"], [])])
def test_frames_that_do_not_fit(frames, captions):
    with pytest.raises(ValueError, match="stepper needs"):
        Stepper(frames, captions, b"", "x")


def luminance(colour):
    """Relative luminance of "#rrggbb" as WCAG 2 defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", [name for name, look in LOOKS.items() if look.light])
def test_colours_stand_out_in_both_themes(name):
    """Contrast of at least 3 : 1 with JupyterLab's white and its #111111."""
    assert 1.05 / (luminance(LOOKS[name].light) + 0.05) >= 3
    assert (luminance(LOOKS[name].dark) + 0.05) / (luminance("#111111") + 0.05) >= 3


@pytest.mark.parametrize("module", [words, lanes])
def test_examples_in_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_functions_are_found_after_their_modules_were_imported():
    for name, home in _HOME.items():
        assert home != f"course_lib.show.{name}"
        assert callable(getattr(show, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        show.nothing  # noqa: B018


def test_import_stays_light():
    code = "import sys, course_lib.show; assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
