"""What a person can mend: a wrong option, a missing folder, numbers that do not fit together."""


class ConfigError(Exception):
    """One full sentence that says what is wrong and what would do. The program prints it and exits with 2."""
