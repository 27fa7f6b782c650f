import threading
from multiprocessing import Pipe

from outrider.verifier_service.pipe_writer import PipeWriter


def test_frames_arrive_in_order_and_a_full_pipe_blocks_nobody():
    near, far = Pipe()
    writer = PipeWriter(near, lambda error: None)
    frames = [bytes([index]) * 1_000_000 for index in range(20)]  # more than any pipe's buffer
    for frame in frames:
        writer.write(frame)  # would never return if it wrote here: nobody reads yet
    assert [far.recv_bytes() for _ in frames] == frames
    writer.close()


def test_loss_of_the_reader_is_told_once():
    near, far = Pipe()
    failures: list[OSError] = []
    told = threading.Event()

    def on_failure(error: OSError) -> None:
        failures.append(error)
        told.set()

    writer = PipeWriter(near, on_failure)
    far.close()
    writer.write(b"x")
    assert told.wait(5)
    writer.write(b"y")
    writer.close()
    assert len(failures) == 1
