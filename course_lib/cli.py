"""The `course` command. Each sub-command is loaded when it is called, so that `course --help` is quick."""

import os
import sys
from difflib import get_close_matches
from importlib import import_module

from course_lib.startup import importing

# command: (module with main(argv) -> exit code, what it does)
COMMANDS = {
    "doctor": ("course_lib.cluster.doctor", "is this machine fit for the course? (--json for programs)"),
    "check": ("course_lib.check.command", "check exercises: course check exercises/*/*.ipynb"),
    "soak": ("course_lib.train.soak", "kill a training run again and again; are its promises kept?"),
    "report": ("course_lib.show.report", "one HTML page about a training run: course report RUN"),
    "bench": ("course_lib.cli", "measure side by side: course bench launch, ring, hooks, loop or scaling"),
}
BENCHES = {
    "launch": ("course_lib.launch.bench", "from the call to results, against plain torchrun"),
    "ring": ("course_lib.collectives.bench", "the course's all-reduce against gloo, TCP and memory limits"),
    "hooks": ("course_lib.parallel.bench_hooks", "a training step with gloo against the course's shared-memory hook"),
    "loop": ("course_lib.train.bench_loop", "the training loop against bare DDP, Fabric, Accelerate and the Trainer"),
    "scaling": ("course_lib.train.bench_scaling", "training on 1 against N ranks, and what stands in the way of N"),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of `course`. 2 for a command that does not exist."""
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            if words[:1] == ["bench"]:
                return _call("course bench", BENCHES, words[1:])
            return _call("course", COMMANDS, words)
        finally:
            sys.stdout.flush()  # here, where it can be caught that nobody reads any more
    except BrokenPipeError:  # course doctor | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return 141  # what a shell says of a program that SIGPIPE ended
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _call(program: str, commands: dict[str, tuple[str, str]], words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(program, commands))
        return 0 if words else 2
    name, *rest = words
    if name not in commands:
        close = get_close_matches(name, commands, 1)
        hint = f" Did you mean '{program} {close[0]}'?" if close else ""
        print(f"'{program}' has no command '{name}'.{hint} It has: {', '.join(commands)}.", file=sys.stderr)
        return 2
    with importing():
        module = import_module(commands[name][0])
    return module.main(rest)


def _help(program: str, commands: dict[str, tuple[str, str]]) -> str:
    lines = [f"usage: {program} COMMAND [options]", ""]
    lines += [f"  {name:<8} {text}" for name, (_, text) in commands.items()]
    return "\n".join([*lines, "", f"{program} COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
