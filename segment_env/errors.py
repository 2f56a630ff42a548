"""The one error that stands for a user's mistake, what it quotes of others, and the check of a rate that several parts share."""


class UserError(ValueError):
    """A mistake of the user's: the message is one line that says what is wrong and what would be right.

    The command line prints the message alone and exits with status 2.
    """


def one_line(error: BaseException) -> str:
    """The first line of what another library's error says, without its full stop; the kind of error where it says nothing.

    Of an error of the file system what went wrong, without the path.
    """
    text = getattr(error, "strerror", None) or str(error)
    return next(iter(text.strip().splitlines()), "").rstrip(". ") or type(error).__name__


def check_rate(rate: float, name: str) -> None:
    """Raises UserError unless ``rate``, called ``name`` in the message, lies strictly between 0 and 1 (boundaries per byte)."""
    if not 0 < rate < 1:
        raise UserError(f"{name} must lie strictly between 0 and 1 (boundaries per byte), got {rate}")
