"""One suite for all transports; then what is special to each."""

import functools
import re
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from mpi_transport_program import CASES
from nightly import at_night

from gemsc.base.rng import same_draws
from gemsc.errors import GemscError, InternalError
from gemsc.launch.launch import launch
from gemsc.launch.mpirun import find_mpirun
from gemsc.messages.grid_message import GridMessage, TileValue
from gemsc.messages.message import Message, Value
from gemsc.runtime.transport import mpi, mpi_group, waiting
from gemsc.runtime.transport.device_transport import MOST_DEFERRED, DeviceTransport
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.mailbox import Mailbox
from gemsc.runtime.transport.mpi_messages import InSteps
from gemsc.runtime.transport.streams import CudaStreams, Pending, Streams
from gemsc.runtime.transport.waiting import check_in_waits, check_no_more, wait

PROGRAM = str(Path(__file__).parents[1] / "support" / "mpi_transport_program.py")


@functools.cache
def mpirun_is_missing() -> str:
    try:
        find_mpirun()
        import mpi4py  # noqa: F401
    except (GemscError, ImportError) as error:
        return str(error)
    return ""


def run_mpi(
    num_ranks: int,
    folder: Path,
    names: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    engine: str | None = None,
) -> tuple[int, str]:
    """Return the exit code and all output of the program."""
    if engine != "torch" and (reason := mpirun_is_missing()):
        pytest.skip(reason)
    with (folder / "output").open("w+") as output:
        code = launch(
            num_ranks,
            [sys.executable, PROGRAM, *names],
            stdout=output,
            stderr=output,
            env=env,
            timeout=60,
            engine=engine,
        )
        output.seek(0)
        return code, output.read()


@pytest.fixture(scope="module")
def mpi_output(tmp_path_factory):
    """All cases in one job: to start Python takes longer than the cases do."""

    @functools.cache
    def run(num_ranks: int, engine: str) -> str:
        folder = tmp_path_factory.mktemp(engine)
        code, output = run_mpi(num_ranks, folder, engine=engine)
        return f"{output}\nexit code {code}\n"

    return run


@pytest.mark.slow(30)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_threads(case, num_ranks):
    run_local(num_ranks, case, timeout=20)


@pytest.mark.slow(14)
@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, *at_night(4)])
@pytest.mark.parametrize("engine", ["mpi", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_processes(name, engine, num_ranks, mpi_output):
    output = mpi_output(num_ranks, engine)
    assert f"passed {name}\n" in output, output


# threads


def test_a_send_is_complete_only_when_it_was_received():
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            request = transport.send(torch.ones(1), 1, 1)
            time.sleep(0.02)
            assert not request.done()
            transport.barrier()
            transport.wait(request)
        else:
            transport.barrier()
            transport.wait(transport.receive(torch.empty(1), 0, 1))

    run_local(2, main)


def test_a_deadlock_is_found_at_once_and_says_who_waits():
    def main(transport: LocalTransport) -> None:
        other = 1 - transport.rank
        transport.wait(transport.receive(torch.empty(2, 3), other, 5))

    with pytest.raises(InternalError) as caught:
        run_local(2, main)
    assert str(caught.value) == (
        "deadlock: rank 0 waits for receive of 2x3 float32 from rank 1 with tag 5; "
        "rank 1 waits for receive of 2x3 float32 from rank 0 with tag 5"
    )


def test_to_wait_for_a_rank_that_has_finished_is_a_deadlock():
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.barrier()

    with pytest.raises(InternalError, match="rank 1 waits for nothing, it has fin"):
        run_local(2, main)


@pytest.mark.parametrize("other", [torch.empty(3), torch.empty(2, dtype=torch.int32)])
def test_a_message_that_does_not_fit_is_an_error(other):
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.wait(transport.send(torch.ones(2), 1, 1))
        else:
            transport.wait(transport.receive(other, 0, 1))

    with pytest.raises(InternalError, match="does not fit: send of 2 float32"):
        run_local(2, main)


def test_an_error_on_one_rank_wakes_the_others():
    def main(transport: LocalTransport) -> None:
        if transport.rank == 2:
            raise ValueError("broken")
        transport.wait(transport.receive(torch.empty(1), 2, 1))

    started = time.monotonic()
    with pytest.raises(ValueError, match="broken") as caught:
        run_local(3, main)
    assert caught.value.__notes__ == ["on rank 2"]
    assert time.monotonic() - started < 2


def test_a_rank_that_never_ends_is_a_time_out():
    gate = threading.Event()

    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            gate.wait(10)
        transport.barrier()

    threading.Timer(0.4, gate.set).start()
    with pytest.raises(
        InternalError, match=r"nothing moved for 0.2 s: .*rank 1 waits for"
    ):
        run_local(2, main, timeout=0.2)


def test_a_message_that_nobody_received_is_an_error():
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.send(torch.ones(1), 1, 9)

    with pytest.raises(InternalError, match="without a partner: send of 1 float32"):
        run_local(2, main)


def test_ranks_in_different_collectives_are_an_error():
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.barrier()
        else:
            transport.all_gather_object(1)

    with pytest.raises(InternalError, match=r"but (barrier|exchange)"):
        run_local(2, main)


# MPI


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, *at_night(4)])
@pytest.mark.parametrize("engine", ["mpi", "torch"])
def test_ranks_end_after_they_closed_the_transport(engine, num_ranks, mpi_output):
    assert "\nexit code 0\n" in mpi_output(num_ranks, engine)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_raises_ends_the_job_in_seconds(tmp_path):
    started = time.monotonic()
    code, output = run_mpi(3, tmp_path, ("a_rank_that_raises",))
    assert time.monotonic() - started < 20
    assert code == 3
    assert output.count("Traceback") == 1
    assert output.rstrip("\0 \n").endswith("ValueError: an error on rank 1"), output


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["torch", *at_night("mpi")])
def test_a_message_that_is_too_short_is_an_error(engine, tmp_path):
    case = "a_message_that_is_too_short"
    code, output = run_mpi(2, tmp_path, (case,), engine=engine)
    assert code == 3
    assert "message 1 from rank 1 to rank 0: 8 bytes came, not 12" in output


@pytest.mark.mpi
@pytest.mark.nightly
def test_large_messages_arrive_where_ranks_cannot_read_each_others_memory(tmp_path):
    none = {"OMPI_MCA_smsc": "^cma,knem,xpmem"}  # as in a container without ptrace
    case = "a_message_of_32_mib_arrives"
    code, output = run_mpi(3, tmp_path, (case,), none)
    assert code == 0, output
    assert f"passed {case}\n" in output


@pytest.mark.mpi
def test_a_message_that_is_too_large_for_a_count_goes_in_pieces(mpi_output):
    assert "passed a_message_in_pieces\n" in mpi_output(2, "mpi")


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, *at_night(4)])
def test_a_sum_that_is_too_large_for_a_count_goes_in_pieces(num_ranks, mpi_output):
    assert "passed a_sum_in_pieces\n" in mpi_output(num_ranks, "mpi")


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, *at_night(4)])
def test_large_sums_of_halves_go_on_whatever_their_members_wait_for(
    num_ranks, mpi_output
):
    output = mpi_output(num_ranks, "mpi")
    assert "passed large_halves\n" in output, output


@pytest.mark.mpi
def test_a_large_message_comes_while_its_receiver_computes(mpi_output):
    output = mpi_output(2, "mpi")
    assert "passed a_message_comes_while_its_receiver_computes\n" in output, output


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["mpi", "torch"])
def test_a_rank_that_waits_leaves_the_core_to_others(engine, mpi_output):
    match = re.search(r"cpu seconds ([\d.]+)", mpi_output(2, engine))
    assert match is not None
    assert float(match[1]) < 0.25  # measured 0.03; a blocking MPI wait takes 0.98


def test_a_missing_mpi4py_is_told_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(GemscError, match=r"help: pip install 'gemsc\[mpi\]'"):
        mpi.MpiTransport()


# waiting and deferred messages


class Countdown:
    def __init__(self, turns: int) -> None:
        self.turns = turns

    def done(self) -> bool:
        self.turns = max(0, self.turns - 1)
        return self.turns == 0


def test_a_wait_of_seconds_is_checked_until_that_is_taken_back(monkeypatch):
    monkeypatch.setattr(waiting, "CHECK_SECONDS", 0.001)
    seen = []
    end = time.monotonic() + 0.02
    check_in_waits(seen.append)
    wait(SimpleNamespace(done=lambda: time.monotonic() > end))
    assert seen
    check_no_more(seen.append)
    assert not waiting._checks


def test_waiting_asks_each_request_until_it_is_done():
    requests = [Countdown(1), Countdown(200), Countdown(20)]
    wait(*requests)
    assert [request.turns for request in requests] == [0, 0, 0]


class SlowStreams(Streams):
    """The CPU in the part of a device: copies take some turns to be ready."""

    in_order = False
    device = torch.device("meta")  # not one that the transport could read

    def __init__(self) -> None:
        self.num_copies = 0

    def to_host(self, tensor):
        self.num_copies += 1
        return Pending(tensor.clone(), Turns(5 if self.num_copies % 2 else 1))


class Turns(Countdown):
    def query(self) -> bool:
        return self.done()


def test_deferred_messages_and_sums_start_in_order_while_a_rank_waits():
    def main(transport: LocalTransport) -> None:
        link = DeviceTransport(transport, SlowStreams())
        other = 1 - transport.rank
        incoming = [link.receive((3,), torch.float32, other, 1) for _ in range(6)]
        sends = [link.send(torch.full((3,), float(n)), other, 1) for n in range(6)]
        sums = [torch.full((2,), float(n)) for n in range(4)]
        group = transport.group((0, 1))
        requests = [link.all_reduce(group, tensor) for tensor in sums]
        part, whole = torch.empty(1), torch.empty(2)
        terms = torch.tensor([1.0, 10.0])
        requests.append(link.reduce_scatter(group, terms, [1, 1], part))
        assert [message.take()[0].item() for message in incoming] == [*range(6)]
        link.wait(*sends, *requests)
        assert [tensor[0].item() for tensor in sums] == [0, 2, 4, 6]
        assert part.item() == (2.0, 20.0)[transport.rank]
        link.wait(link.all_gather(group, part, [1, 1], whole))
        assert whole.tolist() == [2.0, 20.0]

    run_local(2, main, timeout=10)


def test_a_deferred_message_starts_whatever_its_sender_waits_for():
    """The receiver comes to that only when it has the message."""

    def main(transport: LocalTransport) -> None:
        link = DeviceTransport(transport, SlowStreams())
        if transport.rank == 0:
            assert link.receive((3,), torch.float32, 1, 1).take()[0] == 7
        else:
            link.send(torch.full((3,), 7.0), 0, 1)
        link.wait(link.host.group((0, 1)).all_reduce(torch.ones(1)))

    run_local(2, main, timeout=10)


def test_a_host_that_is_far_ahead_waits_for_the_device():
    """What is deferred holds memory."""

    def main(transport: LocalTransport) -> int:
        link = DeviceTransport(transport, SlowStreams())
        most = 0
        for number in range(20):
            if transport.rank == 0:
                link.send(torch.full((3,), float(number)), 1, 1)
                most = max(most, len(link._deferred))
            else:
                assert link.receive((3,), torch.float32, 0, 1).take()[0] == number
        link.wait(transport.group((0, 1)).all_reduce(torch.ones(1)))
        return most

    assert run_local(2, main, timeout=10)[0] == MOST_DEFERRED


# CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cuda_aware", [False, True])
def test_a_link_carries_tensors_between_streams_of_a_device(cuda_aware):
    device = torch.device("cuda", 0)

    def main(transport: LocalTransport) -> list[float]:
        other = 1 - transport.rank
        results = []
        with torch.cuda.stream(torch.cuda.Stream(device)):
            link = DeviceTransport(transport, CudaStreams(device))
            for step in range(20):
                incoming = link.receive((512, 512), torch.float32, other, 1)
                busy = torch.ones(512, 512, device=device)
                for _ in range(20):  # the send is posted before this has run
                    busy = busy @ busy / 512
                request = link.send(busy * (step + transport.rank), other, 1)
                del busy
                received = incoming.take()
                results.append((received * 2).mean().item())
                link.wait(request)
            total = torch.full((1000,), float(transport.rank + 1), device=device)
            link.wait(link.all_reduce(transport.group((0, 1)), total))
            results.append((total + 0).mean().item())
        return results

    results = run_local(2, main, cuda_aware=cuda_aware)
    for rank in range(2):
        expected = [2.0 * (step + 1 - rank) for step in range(20)]
        assert results[rank] == pytest.approx([*expected, 3.0])


def test_a_value_of_another_shape_is_not_sent_whatever_its_size():
    value = Value("x", (2, 3), torch.float32)
    boxes = tuple(((0, 2), rows) for rows in ((0, 2), (2, 3)))
    cut = TileValue("x", (2, 3), torch.float32, (((0, 2), (0, 3)),), boxes)
    messages = [Message(1, 0, 1, (value,)), GridMessage(1, (0,), (1, 2), (cut,))]

    def main(transport: LocalTransport) -> None:
        link = DeviceTransport(transport, Streams())
        mail = Mailbox(link, 0, None, apart=lambda m: False)
        mail.begin(1, training=True)
        for message in messages:
            with pytest.raises(GemscError, match=r"'x' has shape \[3, 2\] for this"):
                mail.send(message, 0, torch.zeros(3, 2))

    run_local(3, lambda transport: main(transport) if transport.rank == 0 else None)


class Between:
    """Messages between two members in one process; those of one tag stay in order."""

    def __init__(self, member: int, network: dict[Any, Any]) -> None:
        self.member, self.network = member, network

    def send(self, tensor: torch.Tensor, dest: int, tag: int, need: Any) -> Any:
        self.network[self.member, dest, tag].append(tensor.clone())
        return SimpleNamespace(done=lambda: True)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, need: Any) -> Any:
        sent = self.network[source, self.member, tag]
        before = self.network["received by", self.member, tag]
        number = len(before)
        before.append(tensor)

        def done() -> bool:
            for message in sent[number : number + 1]:
                tensor.copy_(message)
            return number < len(sent)

        return SimpleNamespace(done=done)


def test_sums_of_halves_may_go_on_in_any_order(monkeypatch):
    """What follows the first step of a sum begins when that has come."""
    monkeypatch.setattr(mpi_group, "HALVES_BYTES", 0)
    network: Any = defaultdict(list)
    sums, tensors = [], []
    for member in (0, 1):
        comm = mock.Mock(Get_rank=lambda member=member: member)
        group = mpi_group.MpiGroup(mock.MagicMock(), comm, (0, 1), "x", InSteps())
        group._lane = Between(member, network)
        terms = [torch.tensor([n, n + 1.0]).bfloat16() for n in (member, 10 + member)]
        sums.append([group.all_reduce(tensor) for tensor in terms])
        tensors.append(terms)
    for chain in (*sums[0], *reversed(sums[1])):  # one has the second sum first
        chain.advance()
    for chain in (*sums[0], *sums[1]):
        assert chain.advance()
    for one, other in tensors:
        assert one.tolist() == [1, 3]
        assert other.tolist() == [21, 23]


def test_operators_are_looked_up_before_threads_call_them(monkeypatch):
    """Of two threads that do it at a time, one may later call freed memory."""
    asked, look_up = [], torch._ops._get_packet

    def slow(name, module):
        if threading.current_thread() is not threading.main_thread():
            asked.append(name)
            time.sleep(0.02)
        return look_up(name, module)

    def main(transport: LocalTransport) -> None:
        with same_draws():  # a mode of torch's
            torch._foreach_expm1_([torch.ones(1)])  # nobody else calls it

    monkeypatch.setattr(torch._ops, "_get_packet", slow)
    run_local(2, main)
    assert asked == []


def test_a_mailbox_is_finished_when_all_has_been_received():
    """Of the second copy of a model, whose first rank is rank 1."""
    message = Message(1, 0, 1, (Value("x", (2, 3), torch.float32),))
    taken = threading.Event()

    def main(transport: LocalTransport) -> None:
        link = DeviceTransport(transport, Streams())
        mail = Mailbox(link, 1, None, apart=lambda m: False)
        mail.begin(1, training=True)
        if transport.rank == 1:
            mail.send(message, 0, torch.ones(2, 3))
            mail.release_arrived()
            mail.finish()
            assert taken.is_set()
        elif transport.rank == 2:
            time.sleep(0.05)
            taken.set()
            (x,) = mail.receive(message, 0)
            assert x.eq(1).all()

    run_local(3, main, timeout=10)
