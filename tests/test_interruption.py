"""The first signal is noted, the second does what it did before."""

import signal
import threading

import pytest

from agents.interruption import Interruption


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(first) -> None:
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        assert interruption.caught is None
        signal.raise_signal(first)
        assert interruption.caught is first
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_those_of_before_afterwards() -> None:
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert not seen and interruption.caught is signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert seen == [1]
    with Interruption() as interruption:
        pass
    signal.raise_signal(signal.SIGTERM)
    assert seen == [1, 1] and interruption.caught is None


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.caught is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_changes_nothing() -> None:
    found = []

    def run() -> None:
        with Interruption():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def test_patience_stays_with_the_first_signal() -> None:
    with Interruption(patient=True) as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interruption.caught is signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
