"""What a person can mend: a wrong option, a missing folder, numbers that do not fit together, a full disk."""


class ConfigError(Exception):
    """One full sentence that says what is wrong and what would do. The program prints it and exits with 2."""

    def _render_traceback_(self) -> list[str]:
        from course_lib.launch.errors import wrapped  # for notebooks: ranks do without

        return [wrapped(f"ConfigError: {self}")]  # the sentence, not the frames of this library


class CannotWrite(Exception):
    """The run folder takes no more: one full sentence. The program prints it and exits with 74."""


class Diverged(Exception):
    """The loss is no number any more. All ranks raise it at the same step, so all can leave in good order."""
