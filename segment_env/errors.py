"""The one error that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake of the user's: the message is one line that says what is wrong and what would be right.

    The command line prints the message alone and exits with status 2.
    """
