"""Starting again when a rank dies: when, from where, on how many ranks."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import MODEL, start
from host_pair import two_hosts

from gemsc.base.files import write_text
from gemsc.launch import start as starting
from gemsc.launch.hosts import Host
from gemsc.launch.launch import Ending
from gemsc.launch.start import calls_for_restart, fewer_ranks, last_step
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.manifest import Manifest

KILLED = Ending(137, "rank 1 was ended by signal 9 (Killed)", step=5)
DIES = """

class Mortal(Data):
    def __getitem__(self, index):
        import os
        from pathlib import Path

        if Path("program/runs/1/latest").exists() and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def dataset():
    return Mortal(24)
"""


# when


@pytest.mark.parametrize(
    ("ending", "again"),
    [
        (KILLED, True),
        (Ending(137, step=4), True),
        (Ending(124, step=4), True),  # the ranks hung
        (Ending(1, step=5), True),  # an exception, but not at once
        (Ending(1), True),  # no rank is on this host
        (Ending(1, step=4), False),  # the first step is the one that fails
        (Ending(0, step=9), False),
        (Ending(75, step=9), False),  # asked to leave, with a checkpoint
        (Ending(130, is_asked=True, step=9), False),
    ],
)
def test_only_what_may_do_better_starts_again(ending, again):
    assert calls_for_restart(ending, first_step=4) is again


def test_the_last_step_is_that_of_the_last_checkpoint(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "latest").symlink_to("step-000120")
    assert last_step(tmp_path) == 120


# how often, and with which arguments


@pytest.fixture
def endings(command, monkeypatch):
    """Endings of the next jobs, and their arguments; nothing is started."""
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    endings, started = [], []

    def launch(ranks, words, *, at_end, **options):
        started.append((ranks, words[1:], options["hosts"]))
        at_end(endings.pop(0))

    monkeypatch.setattr(starting, "launch", launch)
    return endings, started


@pytest.mark.slow
def test_it_goes_on_from_the_last_checkpoint_as_often_as_asked(endings, command):
    endings, started = endings
    endings += [replace(KILLED, step=0), KILLED, Ending(1, step=9)]
    words = "run", "program", "--restarts", "2", "--save", "saved", "--steps", "9"
    done = command(*words)
    assert done.code == 1
    assert done.err == (
        "restart 1 of 2 from step 0: rank 1 was ended by signal 9 (Killed)\n"
        "restart 2 of 2 from step 0: rank 1 was ended by signal 9 (Killed)\n"
    )
    given = ["program", "--save", "saved", "--steps", "9"]
    assert started == [(2, given, ()), *[(2, [*given, "--resume"], ())] * 2]


@pytest.mark.slow
def test_it_does_not_go_on_from_the_run_that_it_was_to_replace(
    endings, command, monkeypatch
):
    """As long as no rank has come so far as to remove that."""
    endings, started = endings
    saved = Path("saved")
    (saved / "step-000009").mkdir(parents=True)
    (saved / "step-000009" / "manifest.json").touch()
    (saved / "latest").symlink_to("step-000009")
    (saved / "run.json").write_text("{}")
    endings += [replace(KILLED, step=0), Ending(1, step=5), Ending(0)]
    ended = starting.calls_for_restart

    def removed(ending, step):
        if ending.code == 1:  # what the second of them did
            write_text(saved / "run.json", "{}")
            (saved / "latest").unlink()
        return ended(ending, step)

    monkeypatch.setattr(starting, "calls_for_restart", removed)
    words = "run", "program", "--restarts", "2", "--save", "saved", "--overwrite"
    done = command(*words)
    assert done.code == 0
    assert "restart 1 of 2 from step 0" in done.err
    given = ["program", "--save", "saved", "--overwrite"]
    assert [words for _, words, _ in started] == [given, given, [*given, "--resume"]]


@pytest.mark.slow
def test_where_a_run_that_died_can_go_on_is_said(endings, command):
    """Of an error a rank has said it, above."""
    endings, _ = endings
    endings += [KILLED, Ending(1, step=5), Ending(0, step=9), KILLED]
    Path("saved").mkdir()
    Path("saved/latest").symlink_to("step-000004-early")
    words = "run", "program", "--save", "saved", "--overwrite"
    said = [command(*words).err for _ in range(3)]
    kept = "note: saved holds the checkpoint of step 4: go on with --resume\n"
    assert said == [kept, "", ""]
    Path("saved/latest").unlink()
    assert command(*words).err == ""


@pytest.mark.slow
def test_it_goes_on_in_the_folder_that_the_run_got(endings, command):
    endings, started = endings
    endings += [KILLED, Ending(0, step=9)]
    assert command("run", "program", "--restarts", "1").code == 0
    assert started[0][1] == ["program", "--save", "program/runs/1"]
    assert started[1][1] == ["program", "--save", "program/runs/1", "--resume"]


# on fewer ranks


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("options", "ranks", "slots", "fewer"),
    [
        ({"ranks": 4, "data": 2, "micro_batches": 3}, 4, 3, (2, 1, 6)),
        ({"ranks": 4, "data": 4, "micro_batches": 3}, 4, 3, (3, 3, 4)),
        ({"ranks": 4, "data": 4, "micro_batches": 1}, 4, 3, (2, 2, 2)),
        ({"ranks": 4, "micro_batches": 3, "blocks": [1, 1, 1, 1]}, 4, 3, (3, 1, 3)),
        ({"ranks": 8, "data": 2, "tiles": ["2x2"]}, 8, 3, (3, 1, 8)),
    ],
)
def test_fewer_ranks_have_the_same_batch(endings, options, ranks, slots, fewer):
    plan = Plan.read(Path("program/plan.toml"))
    given = {"data": 1, "micro_batches": 4} | options
    counts = {"data": given["data"], "micro_batches": given["micro_batches"]}
    reduced = fewer_ranks(replace(plan, ranks=ranks, options=given, **counts), slots)
    assert (reduced.ranks, reduced.data, reduced.micro_batches) == fewer
    assert not reduced.tiles
    assert not reduced.blocks


@pytest.mark.nightly
def test_a_host_that_is_lost_is_left_out(endings, command, monkeypatch):
    endings, started = endings
    endings += [KILLED, KILLED, Ending(0)]
    a, b = Host("a", 1), Host("b", 1)
    left = [(a, b), (b,)]
    monkeypatch.setattr(starting, "that_answer", lambda hosts: left.pop(0))
    monkeypatch.setattr(starting, "check_hosts", lambda hosts, directory: None)
    words = "run", "program", "--restarts", "2", "--save", "saved", "--hosts", "a,b"
    done = command(*words)
    assert done.code == 0, done.err
    assert [hosts for _, _, hosts in started] == [(a, b), (a, b), (b,)]
    assert [ranks for ranks, _, _ in started] == [2, 2, 1]
    assert started[-1][1][0] == "program/restart-1-ranks"
    fewer = Plan.read(Path("program/restart-1-ranks/plan.toml"))
    assert fewer.batch_size == Plan.read(Path("program/plan.toml")).batch_size


@pytest.mark.slow
def test_why_a_program_cannot_have_fewer_ranks_is_told(endings, command, monkeypatch):
    endings, started = endings
    endings += [KILLED]
    monkeypatch.setattr(starting, "that_answer", lambda hosts: (Host("a", 1),))
    monkeypatch.setattr(starting, "check_hosts", lambda hosts, directory: None)
    words = "run", "program", "--restarts", "2", "--save", "saved", "--hosts", "a,b"
    plan = Path("program/plan.toml")
    plan.write_text(plan.read_text().replace('frontend = "record"', 'frontend = "x"'))
    done = command(*words)
    assert (done.code, len(started)) == (137, 1)
    assert (
        "has 2 ranks, the hosts that answer have room for 1, and it cannot be"
        in done.err
    )
    assert "--frontend does not take 'x'" in done.err


# real ranks


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_is_killed_once_does_not_end_the_training(command):
    Path("model.py").write_text(MODEL + DIES)
    assert command("compile", "model.py", "-o", "program").code == 0
    words = "--epochs", "2", "--restarts", "1"
    done = start("run", "program", *words)
    assert done.code == 0, done.err
    assert "was ended by signal 9 (Killed) in reading the dataset" in done.err
    assert "restart 1 of 1 from step 3: rank " in done.err
    assert last_step(Path("program/runs/1")) == 6


@pytest.mark.mpi
@pytest.mark.nightly
def test_training_goes_on_without_a_host_that_is_lost(command, tmp_path):
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    with two_hosts(tmp_path) as pair:
        words = "--epochs", 20, "--restarts", 1, "--hosts", ",".join(pair.addresses)
        with pair.popen(0, "timeout", 200, "gemsc", "run", "program", *words) as job:
            while job.poll() is None and not Path("program/runs/1/latest").exists():
                time.sleep(0.1)
            pair.lose(1)
            _, err = job.communicate()
        assert job.returncode == 0, err
        assert "restart 1 of 1 from step " in err
        assert Path("program/restart-1-ranks").is_dir()
        assert last_step(Path("program/runs/1")) == 60


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_run_that_loses_a_host_goes_on_elsewhere_bit_for_bit(command, tmp_path):
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    words = "gemsc", "run", "program", "--epochs", 60, "--save"
    with two_hosts(tmp_path) as pair:
        hosts = "--hosts", ",".join(pair.addresses)
        with pair.popen(0, "timeout", 200, *words, "lost", *hosts) as job:
            while job.poll() is None and not Path("lost/latest").exists():
                time.sleep(0.1)
            pair.lose(1)
            _, err = job.communicate()
        assert job.returncode in (1, 255), err
        says = (
            f"error: host {pair.spaces[1]} was lost",
            "255, as ssh when a host is lost",
        )
        assert any(text in err for text in says), err
        begun = last_step(Path("lost"))
        assert 0 < begun < 180
        for run in (("lost", "--resume"), ("straight",)):
            code, _, err = pair.run(0, *words, *run)
            assert code == 0, err
    assert Manifest.read(Path("lost/latest")) == Manifest.read(Path("straight/latest"))
