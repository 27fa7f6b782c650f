"""Two learners never have one folder: not within a process, not in two, and a killed one lets go."""

import multiprocessing
import os
import signal
import time

import pytest

from outrider.drafter_service.learning.folder_lock import own_folder
from support.clock import Clock


def hold(folder, is_held):
    with own_folder(folder):
        is_held.set()
        time.sleep(600.0)


def test_a_folder_that_is_held_is_refused_by_name_after_a_while(tmp_path):
    clock = Clock()
    with own_folder(tmp_path / "pool"), own_folder(tmp_path / "other"):
        with pytest.raises(ValueError, match=r"learner: folder: .*pool is another learner's"):
            own_folder(tmp_path / "pool", clock=clock, sleep=clock.sleep).__enter__()
        assert clock.now_s == pytest.approx(10.0, abs=0.2)
    with own_folder(tmp_path / "pool", patience_s=0.0):
        assert (tmp_path / "pool").is_dir()


def test_a_learner_that_was_killed_lets_go(tmp_path):
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    process = context.Process(target=hold, args=(tmp_path, is_held))
    process.start()
    try:
        assert is_held.wait(30.0)
        with pytest.raises(ValueError, match="is another learner's"), own_folder(tmp_path, patience_s=0.0):
            raise AssertionError("two hold it")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with own_folder(tmp_path, patience_s=0.0):
        assert tmp_path.is_dir()
