"""SIGINT and SIGTERM are noted, so that what is under way is finished first; the second of them stops at once."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context in which the first signal is only noted, in ``caught``; from then on signals do what they did before.

    With ``patient`` further ones change nothing: ``torchrun`` passes on what a terminal has sent to all already. A signal that is
    ignored stays ignored, as under ``nohup``; outside the main thread, which alone may handle signals, nothing is changed.
    """

    def __init__(self, patient: bool = False):
        self.patient = patient
        self.caught: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = self.caught or signal.Signals(number)
        if not self.patient:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
