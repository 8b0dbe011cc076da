"""Errors that a user can mend: the command line prints their message without a traceback."""


class UserError(Exception):
    """Something in the user's files, configuration or command must change; the message says what."""


class ConfigError(UserError):
    """A configuration value is unknown, missing or contradicts another."""


class DivergedError(UserError):
    """Training produced numbers that are not finite, and cannot go on."""


class DataError(UserError):
    """A data file or data set cannot be used; the message names the file and line."""
