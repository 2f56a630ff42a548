"""How text is shown that may hold anything: on one line, and as what it is."""


def printable(text: str) -> str:
    r"""``text`` with all that cannot be printed escaped, as Python does: controls, line ends, marks that turn the direction of reading.

    >>> printable("a\n\u202eb")
    'a\\n\\u202eb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
