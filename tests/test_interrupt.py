import signal
import threading

import pytest

from pagedinfer.engine.interrupt import DeferredInterrupt


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_waits_for_the_end():
    done = []

    def step():
        with DeferredInterrupt() as interrupt:
            ctrl_c()
            ctrl_c()  # outside the forward pass any number of them waits
            assert interrupt.pending
            done.append("the rest of the step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done


def test_without_an_interrupt_nothing_happens():
    with DeferredInterrupt() as interrupt:
        pass
    assert not interrupt.pending


def test_a_second_interrupt_stops_the_forward_pass_at_once():
    done = []
    with DeferredInterrupt() as interrupt:
        interrupt.forward = True
        ctrl_c()
        done.append("after the first")
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        interrupt.forward = False
    assert done  # and the end raises no third time


def test_an_error_does_not_swallow_the_interrupt():
    def step():
        with DeferredInterrupt():
            ctrl_c()
            raise ValueError("the step failed as well")

    with pytest.raises(KeyboardInterrupt) as caught:
        step()
    assert isinstance(caught.value.__context__, ValueError)


def test_nested_blocks_raise_at_the_outermost_end():
    done = []

    def submit_and_step():
        with DeferredInterrupt():
            with DeferredInterrupt():
                ctrl_c()
            done.append("between the ends")

    with pytest.raises(KeyboardInterrupt):
        submit_and_step()
    assert done


def test_a_program_that_ignores_interrupts_keeps_ignoring_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupt() as interrupt:
            ctrl_c()
        assert not interrupt.pending
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_with_its_own_handler_gets_it_called():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with DeferredInterrupt():
            ctrl_c()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone():
    seen = []

    def work():
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
