"""What a person can mend: a wrong option, a missing folder, numbers that do not fit together."""


class ConfigError(Exception):
    """One full sentence that says what is wrong and what would do. The program prints it and exits with 2."""

    def _render_traceback_(self) -> list[str]:
        return [f"ConfigError: {self}"]  # a notebook shows the sentence, not the frames of this library


class Diverged(Exception):
    """The loss is no number any more. All ranks raise it at the same step, so all can leave in good order."""
