"""Machines: what ships is complete and sourced, what is wrong is told, this one is looked at."""

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from memguard.assets import find_asset, list_assets
from memguard.errors import ConfigError
from memguard.planner.assumptions import list_assumptions
from memguard.planner.machine import THIS_MACHINE, Machine, detect_machine, find_gpu, load_machine

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    *("perlmutter", "perlmutter-80gb", "frontier", "alps", "dgx-h100", "h200"),
    *("dgx-a100-40gb", "dgx-a100-80gb", "dgx-b200", "h100-pcie", "l40s", "rtx-4090"),
}
GIB = 2**30
MINE = """\
name: mine
gpu: H100 SXM 80 GB
memory_gib: 80
gpus_per_node: 8
link_gb_per_s: 450
network_gb_per_s: 400
peak_tflops: 989
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    """Let nvidia-smi be this shell script, or missing."""
    if script is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_what_is_asked_for_ships() -> None:
    assert set(list_assets("configs/machines")) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_machine_is_found_by_its_name_and_has_sources(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.sources
    assert all(source.startswith("https://") for source in machine.sources)
    assert machine.gpu.endswith(f" {machine.memory_gib:g} GB")
    text = find_asset("configs/machines", name, setting="--machine").read_text(encoding="utf-8")
    assert text.startswith("# "), "its first line says what machine it is"
    assert ("ours" in text) == bool(machine.assumed), "what is assumed is said to be, and why"


def test_published_figures() -> None:
    """From the sources that the files name."""
    machines = {name: load_machine(name) for name in SHIPPED}
    figures = {
        name: (m.memory_gib, m.gpus_per_node, m.network_gb_per_s) for name, m in machines.items()
    }
    slingshot, connectx = 4 * 200 / 8, 8 * 400 / 8
    assert figures == {
        "perlmutter": (40, 4, slingshot),
        "perlmutter-80gb": (80, 4, slingshot),
        "frontier": (64, 8, slingshot),
        "alps": (96, 4, slingshot),
        "dgx-h100": (80, 8, connectx),
        "h200": (141, 8, connectx),
        "dgx-a100-40gb": (40, 8, 8 * 200 / 8),
        "dgx-a100-80gb": (80, 8, 8 * 200 / 8),
        "dgx-b200": (180, 8, connectx),
        # Cards: the GPUs of a node and its network are assumed.
        "h100-pcie": (80, 8, 12.5),
        "l40s": (48, 8, 12.5),
        "rtx-4090": (24, 2, 1.25),
    }
    # An MI250X: 220 compute units, 1,024 FLOPs a cycle each, 1.7 GHz.
    assert 2 * machines["frontier"].peak_tflops == pytest.approx(220 * 1024 * 1.7e-3, abs=0.1)
    # 25 GB/s a link and direction: 12 links of an A100, 18 of a Hopper GPU.
    assert machines["perlmutter"].link_gb_per_s == 12 * 25
    assert {machines[name].link_gb_per_s for name in ("alps", "dgx-h100", "h200")} == {18 * 25}
    assert machines["dgx-b200"].link_gb_per_s == 18 * 50
    for name in ("h100-pcie", "l40s", "rtx-4090"):
        assert {"gpus_per_node", "network_gb_per_s"} <= set(machines[name].assumed)
    # Bits of the bus, bits a second on each of its lines: GDDR6 18 Gb/s, GDDR6X 21 Gb/s.
    assert machines["l40s"].memory_gb_per_s == 384 / 8 * 18
    assert machines["rtx-4090"].memory_gb_per_s == 384 / 8 * 21
    # Tensor cores x operations a cycle x clock (GHz); GeForce has half with sums in fp32.
    assert machines["l40s"].peak_tflops == pytest.approx(568 * 256 * 2.49e-3, rel=0.01)
    assert machines["rtx-4090"].peak_tflops == pytest.approx(512 * 128 * 2.52e-3, rel=0.01)


def test_shares_of_the_peak_are_those_of_published_kernels() -> None:
    machines = {name: load_machine(name) for name in SHIPPED}
    # TFLOP/s of the largest matmuls, of the table that the files name.
    largest = {"dgx-h100": 794.5, "dgx-a100-80gb": 271.2, "dgx-b200": 1745.0, "alps": 828.6}
    for name, tflops in largest.items():
        machine = machines[name]
        assert machine.matmul_share == pytest.approx(tflops / machine.peak_tflops, abs=6e-4)
    # FlashAttention-2 over causal rows of 16,384 tokens, heads of 128 features.
    for name, tflops in {"dgx-h100": 328, "dgx-a100-80gb": 189, "dgx-b200": 328}.items():
        machine = machines[name]
        assert machine.attention_share == pytest.approx(tflops / machine.peak_tflops, abs=6e-4)
    assert "attention_share" in machines["dgx-b200"].assumed


def test_each_gpu_is_in_one_machine_of_a_size() -> None:
    pairs = [
        (gpu, machine.gpus_per_node)
        for machine in map(load_machine, sorted(SHIPPED))
        for gpu in machine.gpu_names
    ]
    assert len(pairs) == len(set(pairs)) == len(SHIPPED)


@pytest.mark.parametrize(
    ("script", "name"),
    [("perlmutter", "perlmutter"), ("frontier", "frontier"), ("h100", "dgx-h100")],
)
def test_job_scripts_start_as_many_ranks_a_node(script: str, name: str) -> None:
    text = (ROOT / "scripts" / "slurm" / f"{script}.sh").read_text(encoding="utf-8")
    (gpus,) = re.findall(r"^GPUS_PER_NODE=(\d+)", text, re.MULTILINE)
    assert int(gpus) == load_machine(name).gpus_per_node


def test_memory_is_what_vendors_mean(tmp_path: Path) -> None:
    machine = load_machine(write(tmp_path, MINE))
    assert machine.memory_bytes == 80 * GIB
    assert machine.usable_bytes == 77 * GIB
    # An A100 "40 GB" reports this many (the module's docstring says where), more than is planned.
    assert load_machine("perlmutter").usable_bytes < 42_405_855_232


def test_a_users_own_file(tmp_path: Path) -> None:
    machine = load_machine(write(tmp_path, MINE + "reserved_gib: 1.5\nlink_topology: direct\n"))
    assert (machine.name, machine.reserved_gib, machine.link_topology) == ("mine", 1.5, "direct")
    with pytest.raises(ValidationError, match="frozen"):
        machine.memory_gib = 1  # type: ignore[misc]


def test_every_problem_of_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    text = MINE.replace("memory_gib: 80", "memory_gb: 80").replace("450", "fast")
    path = write(tmp_path, text + "link_topology: switch\n")
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    assert caught.value.problems == (
        f"{path} 'memory_gib' is missing: Nominal memory of a GPU (GiB).",
        f"{path}:5:1 'link_gb_per_s' should be a valid number, unable to parse string as a number; "
        "got 'fast'",
        f"{path}:8:1 'link_topology' should be 'switched' or 'direct'; got 'switch'; did you mean "
        "'switched'?",
        f"{path}:3:1 'memory_gb' is not a setting; did you mean 'memory_gib'?",
    )


@pytest.mark.parametrize("line", ["memory_gib: 0", "peak_tflops: .inf", "gpus_per_node: 0"])
def test_impossible_figures_are_refused(tmp_path: Path, line: str) -> None:
    name = line.partition(":")[0]
    text = re.sub(rf"^{name}: .*$", line, MINE, flags=re.MULTILINE)
    with pytest.raises(ConfigError, match=f"'{name}' should be"):
        load_machine(write(tmp_path, text))


def test_the_allowance_must_leave_memory(tmp_path: Path) -> None:
    path = write(tmp_path, MINE + "reserved_gib: 80\n")
    with pytest.raises(ConfigError, match="'reserved_gib' must leave some of 'memory_gib'; got 80"):
        load_machine(path)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load_machine("dgx-h10")
    problem, way_out = caught.value.problems
    assert problem.startswith("'--machine' must be a YAML file or one of alps, dgx-a100-40gb, dgx-")
    assert problem.endswith("did you mean 'dgx-h100'?")
    assert way_out == "'--machine this-machine' plans for the present machine"


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(
        tmp_path, monkeypatch, 'for gpu in 1 2 3 4; do echo "NVIDIA A100-SXM4-40GB, 40960"; done'
    )
    machine = load_machine(THIS_MACHINE, num_processes=16)
    assert machine.gpu == "NVIDIA A100-SXM4-40GB"
    assert machine.gpus_per_node == 4
    assert machine.memory_bytes == 40 * GIB
    assert machine.has_gpus
    # Its speeds are those of the machine that has as many of these GPUs; who knows the network?
    known = load_machine("perlmutter")
    for figure in ("peak_tflops", "memory_gb_per_s", "link_gb_per_s", "matmul_share"):
        assert getattr(machine, figure) == getattr(known, figure)
    assert (machine.link_topology, machine.network_gb_per_s) == ("direct", 100)
    assert machine.assumed == ("network_gb_per_s",)


def test_a_known_gpu_in_a_node_of_another_size() -> None:
    def detect(name: str, count: int) -> Machine:
        return detect_machine(gpus=[(name, 79.0)] * count)

    whole, half = (detect("NVIDIA H100 80GB HBM3", count) for count in (8, 4))
    dgx = load_machine("dgx-h100")
    assert (whole.link_gb_per_s, whole.network_gb_per_s) == (450, dgx.network_gb_per_s)
    # Through a switch every link is used; half of the GPUs have half of the network cards.
    assert (half.link_gb_per_s, half.network_gb_per_s) == (450, dgx.network_gb_per_s / 2)
    # Of the two machines with this GPU, that of eight; of direct links one leads to each neighbour.
    assert detect("NVIDIA A100-SXM4-80GB", 8).link_topology == "switched"
    assert detect("NVIDIA GH200 120GB", 2).link_gb_per_s == 450 / 3
    # What the machine file itself assumes is not published here either.
    assert detect("NVIDIA L40S", 2).assumed == (
        *("network_gb_per_s", "matmul_share", "attention_share"),
    )


def test_an_unknown_gpu_keeps_assumed_speeds_and_says_so() -> None:
    machine = detect_machine(gpus=[("NVIDIA T4", 15.0)])
    assert (machine.peak_tflops, machine.link_gb_per_s) == (100, 25)
    assert set(machine.assumed) == {
        *("link_gb_per_s", "network_gb_per_s", "memory_gb_per_s", "peak_tflops")
    }
    unknown, figures = list_assumptions(machine, has_mask=False, seq_len=2048)[-2:]
    assert unknown == (
        "'NVIDIA T4' is in no machine file: its speeds are assumed, only to order the meshes"
    )
    assert figures.startswith("this-machine's link_gb_per_s, network_gb_per_s, memory_gb_per_s")
    known = detect_machine(gpus=[("NVIDIA B200", 179.0)] * 8)
    assert not any(
        "machine file" in text for text in list_assumptions(known, has_mask=False, seq_len=2048)
    )
    # Two kinds of GPUs in one machine have no common speed.
    assert find_gpu("NVIDIA A100-SXM4-40GB, NVIDIA T4", 2) is None


def test_of_unequal_gpus_the_smallest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, monkeypatch, 'echo "NVIDIA T4, 15360"; echo "NVIDIA A10G, 23028"')
    machine = detect_machine()
    assert machine.gpu == "NVIDIA A10G, NVIDIA T4"
    assert machine.memory_bytes == 15 * GIB


def test_memory_that_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, monkeypatch, 'echo "NVIDIA GB10, [N/A]"')
    problem = re.escape("nvidia-smi reports 'NVIDIA GB10, [N/A]'. Write")
    with pytest.raises(ConfigError, match=problem):
        detect_machine()


@pytest.mark.parametrize("script", [None, "echo no driver >&2; exit 9", "true"])
def test_processes_share_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    answer(tmp_path, monkeypatch, script)
    one, two = detect_machine(), load_machine(THIS_MACHINE, num_processes=2)
    # MemTotal is what the kernel has left for programs, in units of 1,024 bytes.
    (total,) = re.findall(r"^MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert one.memory_bytes == int(total) * 1024
    assert 2 * two.memory_bytes == pytest.approx(one.memory_bytes, abs=2)  # rounded to bytes
    assert 2 * two.peak_tflops == one.peak_tflops
    assert (one.gpus_per_node, two.gpus_per_node) == (1, 2)
    assert one.gpu == f"CPU process, of {os.cpu_count()} cores"
    assert not one.has_gpus
    assert not one.has_flash
    assert one.peak_flops(4) == one.peak_flops(2), "bf16 is no faster"


def test_more_processes_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, monkeypatch, None)
    with pytest.raises(ConfigError, match=r"'--machine this-machine' has .* GiB a process"):
        detect_machine(1_000_000)
