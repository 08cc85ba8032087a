"""study.toml: expanded into cells; errors name file, line, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from netbottleneck import study
from netbottleneck.lab import LinkSpec
from netbottleneck.launch.connect import Place
from netbottleneck.report.compare import FACTS
from netbottleneck.study import cells, command, spec
from netbottleneck.study.spec import Cell, StudySpec
from netbottleneck.study.task import Outcome

SHIPPED = Path(study.__file__).parent


def made(text: str, **more: object) -> StudySpec:
    """Parse a text as a file called s.toml."""
    return spec.parse(text, "s.toml", **more)  # type: ignore[arg-type]


def keys(found: StudySpec) -> list[str]:
    """Return the keys of the cells."""
    return [cell.key for cell in found.cells]


def test_cells_are_models_by_ranks_by_networks_and_the_fitted_one_is_first() -> None:
    found = made(
        'ranks = [4, 2]\nnetworks = ["2gbit/500mbit", "none"]\nrounds = 7\n'
        '[[model]]\nname = "resnet50"\nscale = 0.5\n[[model]]\njob = "digits"\nranks = [2]\nrounds = 2\n'
    )
    assert found.fit_key == "resnet50-2-2gbit-500mbit"
    assert keys(found) == [
        *("resnet50-2-2gbit-500mbit", "digits-2-2gbit-500mbit"),
        *("resnet50-4-2gbit-500mbit", "resnet50-4-none", "resnet50-2-none", "digits-2-none"),
    ]
    by_key = {cell.key: cell for cell in found.cells}
    assert by_key["resnet50-4-none"].arms == ("stock", "ofi")
    assert by_key["digits-2-none"].arms == ("bare", "stock", "ofi")
    assert [by_key[key].rounds for key in ("resnet50-4-none", "digits-2-none")] == [7, 2]
    assert [cell.key for cell in found.cells if cell.same] == ["digits-2-none"]
    assert by_key["resnet50-2-2gbit-500mbit"].link == LinkSpec(2 * 10**9, (5 * 10**8,))
    assert by_key["resnet50-4-none"].model.scale == 0.5


def test_cells_with_several_ranks_per_host_are_separate_and_not_fitted() -> None:
    found = made(
        'networks = ["2gbit/500mbit"]\n[[model]]\nname = "resnet50"\nranks = [2, 4]\nranks_per_host = 2\n'
        '[[model]]\nname = "resnet50"\n'
    )
    assert found.fit_key == "resnet50-2-2gbit-500mbit"
    alone, one, two = found.cells
    assert [cell.key for cell in (one, two)] == [f"resnet50-2-a-host-{n}-2gbit-500mbit" for n in (2, 4)]
    assert [cell.ranks_per_host for cell in (alone, one, two)] == [1, 2, 2]
    assert (one.link, one.tuned) == (LinkSpec(), False)
    assert (two.link, two.tuned) == (alone.link, True)


def test_networks_of_one_model_have_names_of_their_own() -> None:
    found = made('networks = ["2gbit/500mbit", "2gbit+500mbit"]\n[[model]]\nname = "resnet50"')
    assert keys(found) == ["resnet50-2-2gbit-500mbit", "resnet50-2-2gbit+500mbit"]


def test_inflation_cells_have_three_arms_and_no_single_rank_steps() -> None:
    (cell,) = made('transports = ["tcp", "null"]\nalone = 5\n[[model]]\njob = "inflation"').cells
    assert (cell.arms, cell.alone, cell.key) == (("bare", "null", "tcp"), 0, "thin_resnet-inflation-2-2gbit-500mbit")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            'speed = 3\n[[model]]\nname = "resnet50"',
            1,
            "unknown key 'speed': the top of the file may contain title",
        ),
        (
            'ranks = [2]\n[[model]]\nname = "resnet50"\nstreams = 4',
            4,
            "unknown key 'streams': a [[model]] may contain",
        ),
        ('ranks = 2\n[[model]]\nname = "resnet50"', 1, "ranks = 2: write a list, such as [2, 4]"),
        ('ranks = [0]\n[[model]]\nname = "resnet50"', 1, "0: write a whole number from 1 to 200"),
        ('ranks = [true]\n[[model]]\nname = "resnet50"', 1, "write a whole number"),
        ('ranks = [2, 2]\n[[model]]\nname = "resnet50"', 1, "name each value once"),
        ('ranks = [1]\n[[model]]\njob = "digits"', 1, "the job digits needs at least 2"),
        ('networks = ["2gbit", "fast"]\n[[model]]\nname = "resnet50"', 1, "'fast' is not a rate: write"),
        (
            f'networks = ["2gbit/{"9" * 400}gbit"]\n[[model]]\nname = "resnet50"',
            1,
            "is not between 1kbit and 1000gbit",
        ),
        (
            'networks = ["1gbit", "1000mbit"]\n[[model]]\nname = "resnet50"',
            1,
            "networks: two of them are the same, resnet50-2-1gbit: name each network once",
        ),
        ('transports = ["stock", "pigeon"]\n[[model]]\nname = "resnet50"', 1, "'pigeon': write one of stock, tcp"),
        ('transports = ["stock", "bare"]\n[[model]]\njob = "digits"', 1, "'bare': write one of stock, tcp, ofi, null"),
        ('rounds = 0\n[[model]]\nname = "resnet50"', 1, "rounds = 0: write a whole number from 1"),
        ('rounds = 1.5\n[[model]]\nname = "resnet50"', 1, "rounds = 1.5: write a whole number"),
        ('title = 3\n[[model]]\nname = "resnet50"', 1, 'title = 3: write a string in "quotes"'),
        (
            'fit = "x"\n[[model]]\nname = "resnet50"',
            1,
            'fit = "x": name a replayed cell of at least 2 hosts with one rank each: resnet',
        ),
        (
            'ranks = [2, 3]\n[[model]]\nname = "resnet50"\nranks_per_host = 2',
            4,
            "ranks_per_host = 2: ranks = 3 is not a multiple of it",
        ),
        ('[[model]]\nname = "resnet50"\n[[model]]\nname = "resnet51"', 4, 'name = "resnet51": write one of resnet18'),
        ("[[model]]\nscale = 1", 1, "no name: write one of resnet18"),
        ('[[model]]\nname = "resnet50"\nscale = -1', 3, "scale = -1: write a number from"),
        ('[[model]]\nname = "resnet50"\nscale = nan', 3, "scale = NaN: write a number from"),
        ('[[model]]\nname = "resnet50"\ncompute_ms = [1]', 3, "write [FORWARD, BACKWARD] in ms"),
        ('[[model]]\nname = "resnet50"\ncompute = "nap"', 3, 'compute = "nap": write one of sleep, spin'),
        ('[[model]]\nname = "resnet50"\njob = "dream"', 3, "write one of digits, replay, inflation"),
        ('[[model]]\nname = "resnet50"\nlabel = "../x"', 3, "write letters, digits"),
        (
            '[[model]]\njob = "digits"\nscale = 2',
            3,
            "scale = 2: only a replay has this key: remove it, or",
        ),
        ('[[model]]\njob = "digits"\nname = "resnet50"', 3, "remove the name"),
        ('[[model]]\nfile = "no.bk.log"', 2, "no.bk.log does not exist"),
        ('[[model]]\nfile = "pyproject.toml"\nname = "resnet50"', 2, "a file replaces name and compute_ms"),
        ('[[model]]\njob = "digits"\n\n[[model]]\njob = "digits"', 4, "duplicate cell name digits-2-2gbit-500mbit"),
        ("ranks = [2]", None, "at least one [[model]]"),
        ('model = "resnet50"', 1, "at least one [[model]]"),
        ("ranks = = 2", None, "(at line 1, column 9)"),
        (f"ranks = [{'9' * 5000}]", None, "digits"),
        (f"ranks = {'[' * 100_000}", None, "recursion"),
    ],
)
def test_invalid_studies_are_refused_with_file_line_value_and_remedy(text: str, line: int | None, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is checked below
        made(text)
    assert str(refused.value).startswith("s.toml" if line is None else f"s.toml, line {line}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize("network", ["2gbit/500mbit,100mbit", "1gbit+250mbit"])
def test_a_network_that_a_real_interface_cannot_have_is_refused(network: str) -> None:
    text = f'interface = "eth0"\nnetworks = ["none", "{network}"]\n[[model]]\nname = "resnet50"'
    with pytest.raises(ValueError, match=r"s\.toml, line 2: networks: .* a real interface supports one cap") as refused:
        made(text, hosts=2)
    assert repr(network) in str(refused.value)
    assert len(keys(made(text))) == 2  # in a lab


def test_too_few_ranks_are_refused_unless_the_cells_are_complete() -> None:
    text = 'ranks = [2, 8]\n[[model]]\nname = "resnet50"'
    with pytest.raises(ValueError, match=r"s\.toml, line 1: ranks = \[2, 8\]: only 4 were started: start more"):
        made(text, hosts=4)
    assert keys(made(text, hosts=4, done=lambda key: key == "resnet50-8-here")) == [
        "resnet50-2-here",
        "resnet50-8-here",
    ]
    assert keys(made('interface = "eth0"\n' + text, hosts=8))[0] == "resnet50-2-2gbit-500mbit"
    with pytest.raises(ValueError, match=r"s\.toml, line 4: ranks_per_host = 2: the launcher places its ranks"):
        made(text + "\nranks_per_host = 2", hosts=8)


@pytest.mark.parametrize("name", ["default", "quick"])
def test_a_shipped_study_gives_every_claim_pairs_and_steps_enough(name: str) -> None:
    path = SHIPPED / f"{name}.toml"
    found = spec.parse(path.read_text(), str(path))
    for cell in found.cells:
        assert cell.rounds >= 2
        assert cell.rounds * (cell.block_steps - 1) >= 5
        assert (cell.alone > 2) == (cell.job != spec.INFLATION)
    assert {cell.job for cell in found.cells} == set(spec.JOBS)
    assert sum(cell.same for cell in found.cells) == 1


def test_the_quick_study_has_two_numbers_of_ranks_and_three_link_speeds_with_one_cap_for_flows() -> None:
    played = [cell for cell in spec.parse((SHIPPED / "quick.toml").read_text(), "q").cells if cell.job == spec.REPLAY]
    assert {cell.ranks for cell in played} == {2, 4}
    assert len({cell.link.link_bps for cell in played if cell.ranks == 2}) >= 3
    assert {cell.link.flow_bps for cell in played} == {(500_000_000,)}


def requested(tmp_path: Path, *arguments: str, size: int = 1, rank: int = 0) -> cells.StudyRequest:
    """Return the study that a command line requests."""
    args = command.parser().parse_args(["--directory", str(tmp_path / "s"), *arguments])
    return cells.parse_request(args, arguments, Place(rank, size))


def cells_of(tmp_path: Path, *arguments: str, size: int = 1) -> dict[str, Cell]:
    """Return the cells that a command line requests."""
    return {cell.key: cell for cell in requested(tmp_path, *arguments, size=size).spec.cells}


def test_options_override_a_shipped_study(tmp_path: Path) -> None:
    arguments = (
        "--jobs",
        "replay",
        "--model",
        "vgg16",
        "--compute-ms",
        "5",
        "6",
        "--networks",
        "1gbit,none",
        "--rounds",
        "9",
    )
    found = cells_of(tmp_path, "--transports", "stock,tcp", *arguments)
    assert list(found) == ["vgg16-2-1gbit", "vgg16-2-none"]
    assert found["vgg16-2-none"].model.compute_ms == (5, 6)
    assert (found["vgg16-2-none"].rounds, found["vgg16-2-none"].arms) == (9, ("stock", "tcp"))
    assert list(cells_of(tmp_path, "--quick", "--jobs", "digits")) == ["digits-2-none"]
    both = cells_of(tmp_path, "--quick", "--jobs", "replay", "--ranks", "2", "--networks", "none")
    assert list(both) == ["resnet50-2-none"]
    assert {cell.ranks for cell in cells_of(tmp_path, size=3).values()} == {3}
    assert {cell.network for cell in cells_of(tmp_path, size=3).values()} == {"here"}
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("option", [("--model", "vgg16"), ("--compute", "spin"), ("--compute-ms", "5", "6")])
def test_an_option_that_no_model_takes_is_a_usage_error(option: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{option[0]}: no model of this study takes it \(jobs: digits;.*leave it out"
    ):
        requested(tmp_path, "--jobs", "digits", *option)


def test_a_model_is_that_of_replays_else_of_inflation(tmp_path: Path) -> None:
    both = cells_of(tmp_path, "--jobs", "replay,inflation", "--model", "resnet18")
    assert {cell.model.name for cell in both.values() if cell.job == "replay"} == {"resnet18"}
    assert {cell.model.name for cell in both.values() if cell.job == "inflation"} == {"thin_resnet"}
    alone = cells_of(tmp_path, "--jobs", "inflation", "--model", "resnet18")
    assert {cell.model.name for cell in alone.values()} == {"resnet18"}
    given = tmp_path / "given.toml"
    (tmp_path / "d.bk.log").write_text("a log\n")
    given.write_text("[[model]]\nfile = 'd.bk.log'\n")
    assert {cell.model.compute for cell in cells_of(tmp_path, str(given), "--compute", "spin").values()} == {"spin"}
    with pytest.raises(ValueError, match="--model: no model of this study takes it"):
        requested(tmp_path, str(given), "--model", "resnet18")


def test_the_fitted_cell_stays_as_long_as_the_options_leave_it(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text(
        'ranks = [2, 4]\nfit = "resnet50-4-none"\nnetworks = ["1gbit", "none"]\n[[model]]\nname = "resnet50"\n'
    )
    kept = requested(tmp_path, str(given), "--transports", "stock,tcp", "--rounds", "7")
    assert (kept.spec.fit_key, kept.notes) == ("resnet50-4-none", ())
    lost = requested(tmp_path, str(given), "--transports", "stock,tcp", "--ranks", "2", "--networks", "1gbit")
    assert lost.spec.fit_key == "resnet50-2-1gbit"
    (note,) = lost.notes
    assert "no cell resnet50-4-none (fit in given.toml): forecasts are fitted to resnet50-2-1gbit" in note
    assert "fit" not in spec.load(lost.text, "stored")


def test_networks_of_a_launchers_ranks_are_not_replaced_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--networks 1gbit: the ranks of a launcher .* leave out --networks, or pass"):
        requested(tmp_path, "--networks", "1gbit", size=2)
    given = tmp_path / "given.toml"
    given.write_text('interface = "eth0"\n[[model]]\nname = "resnet50"\n')
    assert list(cells_of(tmp_path, str(given), "--networks", "1gbit", size=2)) == ["resnet50-2-1gbit"]


def test_rank_0_alone_compares_a_study_with_its_folder(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text('ranks = [2, 4]\n[[model]]\nname = "resnet50"\n')
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.toml").write_text('[[model]]\nname = "vgg16"\n')  # of another study on this host
    assert requested(tmp_path, str(given), size=2, rank=1).spec.cells
    with pytest.raises(ValueError, match="only 2 were started"):
        requested(tmp_path, str(given), size=2)


def test_a_folder_of_another_program_is_refused_on_rank_0(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / cells.LOCK).touch()  # as a start leaves it that ended before it wrote the study
    assert requested(tmp_path, "--quick").spec.cells
    (folder / "run.json").write_text("{}")
    for arguments in ((), ("--quick",)):
        with pytest.raises(ValueError, match=f"^--directory {folder}: has files, but no study.toml: pass a new"):
            requested(tmp_path, *arguments)
    assert requested(tmp_path, "--quick", size=2, rank=1).spec.cells


def test_a_place_or_a_file_of_a_study_that_is_none_is_named_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--directory", f"{tmp_path}/file"], f"--directory {tmp_path}/file: {tmp_path}/file is not a folder: name"),
        (["none.toml"], "none.toml: no such file: name the file of a study"),
        ([str(tmp_path)], f"{tmp_path} is a folder, not a file: to resume its study, pass it as --directory"),
    ):
        assert command.main(arguments) == 2
        assert message in capsys.readouterr().err


def completed(tmp_path: Path, text: str) -> cells.StudyFolder:
    """Return the folder of a study whose cells are complete."""
    folder = cells.StudyFolder(tmp_path / "s")
    folder.create(text)
    for cell in made(text).cells:
        outcome = Outcome(str(folder.cell_folder(cell.key) / "run"), 9, ("a", "a"))
        folder.write_result(cells.CellResult(cell, outcome))
        (folder.cell_folder(cell.key) / FACTS).write_text("{}")
    return folder


MEASURED = (
    'networks = ["1gbit"]\ntransports = ["stock", "tcp"]\n[[model]]\nname = "resnet50"\n[[model]]\njob = "digits"\n'
)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"resnet50"', '"resnet50"\nscale = 0.5', "cell resnet50-2-1gbit .* scale was 1.0, now 0.5: restore"),
        ('"digits"', '"digits"\nrounds = 2', "cell digits-2-1gbit .* rounds was 6, now 2: restore"),
        ('["stock", "tcp"]', '["stock"]', "cell resnet50-2-1gbit .* arms was stock,tcp, now stock: restore"),
    ],
)
def test_a_changed_study_does_not_keep_cells_of_other_values(tmp_path: Path, old: str, new: str, why: str) -> None:
    folder = completed(tmp_path, MEASURED)
    assert len(requested(tmp_path).spec.cells) == 2
    folder.file.write_text(MEASURED.replace(old, new))
    with pytest.raises(ValueError, match=why):
        requested(tmp_path)


def test_a_study_keeps_its_cells_if_others_are_added(tmp_path: Path) -> None:
    folder = completed(tmp_path, MEASURED)
    folder.file.write_text(MEASURED.replace('["1gbit"]', '["1gbit", "none"]'))
    assert len(requested(tmp_path).spec.cells) == 4


def test_a_resumed_study_keeps_the_arms_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "default_transports", lambda _provider: (("stock", "tcp"), ("no ofi",)))
    first = requested(tmp_path, "--quick")
    first.folder.create(first.text)
    monkeypatch.setattr(cells, "default_transports", lambda _provider: (("stock", "ofi"), ()))
    assert requested(tmp_path).spec == first.spec


def test_tables_are_read_as_they_were_written() -> None:
    for name in ("default", "quick"):
        raw = spec.load((SHIPPED / f"{name}.toml").read_text(), name)
        assert spec.load(spec.dump(raw), name) == raw
    odd = {"title": 'A \U0001f600 "quoted" \\ name, \x7f\x01\n\u00e9', "model": [{"name": "resnet50", "scale": 0.5}]}
    assert spec.load(spec.dump(odd), "odd") == odd


def test_an_invalid_file_is_reported_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "d.bk.log"
    damaged.write_text("a log\n1\n2\n5.0,400\n")
    for text, message in (
        ("speed = 1\n[[model]]\nname = 'resnet50'", "line 1: unknown key 'speed'"),
        ("[[model]]\nfile = 'd.bk.log'", "d.bk.log, line"),
    ):
        path = tmp_path / "given.toml"
        path.write_text(text)
        assert study.main([str(path), "--directory", str(tmp_path / "s")]) == 2
        assert message in capsys.readouterr().err
        assert sorted(one.name for one in tmp_path.iterdir()) == ["d.bk.log", "given.toml"]


def test_too_few_hosts_exit_with_code_2_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**launched, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "given.toml"
    path.write_text('title = "four"\nranks = [2, 4]\n[[model]]\nname = "resnet50"\n')
    assert study.main([str(path), "--directory", str(tmp_path / "s")]) == 2
    captured = capsys.readouterr()
    assert f"{path}, line 2: ranks = [2, 4]: only 2 were started: start more, or request fewer" in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert [one.name for one in tmp_path.iterdir()] == ["given.toml"]
