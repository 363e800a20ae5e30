"""Each check, on machines that are fit and on machines that are not."""

import os
import socket
import time

import pytest

from course_lib.cluster import cores, gpus, memory, network, storage, versions
from course_lib.cluster.all_reduce import LENGTH, judge
from course_lib.cluster.doctor import backends


def verdicts(findings):
    return [(finding.check, finding.verdict) for finding in findings]


def assert_problem(finding, *words):
    """A problem says what is wrong and what to do."""
    assert finding.verdict == "problem"
    assert finding.cure
    for word in words:
        assert word in finding.text + finding.cure


def test_this_python_is_fit_and_an_old_one_is_not():
    assert versions.python_version().verdict == "ok"
    assert_problem(versions.python_version("3.9.2"), "3.9.2", ">=3.11")


def pins(tmp_path, torch, vision):
    file = tmp_path / "requirements.txt"
    file.write_text(f"# pins\ntorch=={torch}\ntorchvision=={vision}\nnumpy==1.0\n")
    return file


def test_versions_equal_older_newer(tmp_path, found):
    torch, vision = found["torch"].split("+")[0], found["torchvision"].split("+")[0]
    same = versions.packages(found, pins(tmp_path, torch, vision))
    assert verdicts(same) == [("torch", "ok"), ("torchvision", "ok")]
    older = versions.packages(found, pins(tmp_path, "99.1", vision))
    assert_problem(older[0], "99.1", f"pip install torch==99.1 torchvision=={vision}")
    newer = versions.packages(found, pins(tmp_path, "1.0", vision))
    assert newer[0].verdict == "note"
    missing = versions.packages(found, tmp_path / "absent.txt")
    assert verdicts(missing) == [("torch", "note"), ("torchvision", "note")]


def test_torchvision_for_another_torch(tmp_path, found):
    findings = versions.packages(found | {"torch": "2.1.0"}, pins(tmp_path, "2.1.0", found["torchvision"]))
    assert_problem(findings[-1], "built for torch", "2.1.0")


def test_torchvision_that_cannot_be_imported(tmp_path, found):
    broken = found | {"torchvision": "error: RuntimeError: operator torchvision::nms does not exist"}
    assert_problem(versions.packages(broken, pins(tmp_path, "1.0", "1.0"))[1], "nms does not exist")


def test_no_gloo(found):
    assert backends(found).text == "gloo, nccl."
    assert_problem(backends(found | {"backends": {"gloo": False, "nccl": False, "mpi": True}}), "mpi")


@pytest.mark.parametrize(
    ("number", "setting", "verdict"),
    [(2, "", "ok"), (2, "1", "ok"), (1, "1", "ok"), (2, "2", "note"), (8, "4", "ok"), (8, "5", "note")],
)
def test_threads_multiply(number, setting, verdict):
    assert cores.threads(number, setting).verdict == verdict


@pytest.mark.parametrize("setting", ["two", "0", "-1"])
def test_threads_that_are_no_number(setting):
    assert_problem(cores.threads(4, setting), setting, "unset OMP_NUM_THREADS")


def test_cores_respect_affinity():
    assert 1 <= cores.cores() <= (os.cpu_count() or 1)


def test_a_container_with_half_a_core_more_than_one(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    monkeypatch.setattr(cores, "_QUOTA", quota)
    assert cores.cores() == 1


@pytest.mark.parametrize(
    ("free", "fit", "verdict"),
    [(10_000_000_000, 22, "ok"), (1_500_000_000, 3, "note"), (800_000_000, 1, "problem")],
)
def test_memory(free, fit, verdict):
    finding = memory.memory(400_000_000, free)
    assert finding.verdict == verdict
    assert f"{fit} fit" in finding.text
    assert bool(finding.cure) == (verdict != "ok")


def test_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("700000000\n")
    (tmp_path / "memory.stat").write_text("anon 500000000\ninactive_file 200000000\n")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory.free_bytes() == 500_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes() > 0


def test_disk(tmp_path):
    assert storage.disk(tmp_path, free=6_000_000_000).verdict == "ok"
    assert storage.disk(tmp_path, free=1_000_000_000).verdict == "note"
    assert_problem(storage.disk(tmp_path, free=10_000_000), "0.0 GB")
    assert_problem(storage.disk(tmp_path / "absent"), "absent")
    assert list(tmp_path.iterdir()) == []


def test_shared_memory(tmp_path):
    assert storage.shared_memory(tmp_path, size=2_000_000_000).verdict == "ok"
    assert storage.shared_memory(tmp_path, size=500_000_000).verdict == "note"
    assert_problem(storage.shared_memory(tmp_path, size=1_000_000), "--shm-size")
    assert storage.shared_memory(tmp_path / "absent").verdict == "ok"


def test_port():
    assert network.port().verdict == "ok"

    def refuse(address, timeout):
        raise ConnectionRefusedError("refused")

    assert_problem(network.port(refuse), "refused", "firewall")


def test_default_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        finding = network.default_port(server.getsockname()[1])
    assert finding.verdict == "note"
    assert "--standalone" in finding.cure


def answer(address):
    return lambda *args, **kwargs: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]


def test_host_name_that_is_this_host():
    assert network.host_name("here", answer("127.0.0.1")).verdict == "ok"


def test_host_name_of_another_machine():
    # 192.0.2.0/24 is set aside for documentation (RFC 5737): no machine has it.
    assert_problem(network.host_name("here", answer("192.0.2.7")), "192.0.2.7", "/etc/hosts")


def test_host_name_without_an_address():
    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    assert_problem(network.host_name("nowhere", unknown), "nowhere", "Name or service not known", "/etc/hosts")


def test_host_name_that_is_never_answered():
    assert_problem(network.host_name("slow", lambda *a, **k: time.sleep(30), limit=0.2), "slow", "within 0.2 s")


def test_right_and_wrong_sums():
    right = LENGTH * (1 + 2 + 3)
    assert judge("gloo all-reduce", [right] * 3, 3, 0.1, "cure").verdict == "ok"
    assert_problem(judge("gloo all-reduce", [right, right, LENGTH], 3, 0.1, "cure"), str(right))


H200 = {"name": "NVIDIA H200", "bytes": 141 * 2**30}


def smi(tmp_path, text):
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_no_gpu(found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = gpus.gpus(found, devices=tmp_path)
    assert finding.verdict == "ok"
    assert "lessons 13 and 14 use recorded output" in finding.text


def test_gpus_with_nccl(found, tmp_path):
    there = found | {"gpus": [H200, H200], "nccl": "2.30.7"}
    findings = gpus.gpus(there, smi(tmp_path, "echo 580.65; echo 580.65"))
    assert verdicts(findings) == [("GPU", "ok"), ("NCCL", "ok")]
    assert findings[0].text == "2 x NVIDIA H200, 141 GiB each, driver 580.65."


def test_gpus_that_differ_without_nccl_or_nvidia_smi(found, tmp_path):
    there = found | {"gpus": [H200, {"name": "NVIDIA L4", "bytes": 24 * 2**30}]}
    findings = gpus.gpus(there, str(tmp_path / "absent"))
    assert verdicts(findings) == [("GPU", "ok"), ("nvidia-smi", "note"), ("GPU", "note"), ("NCCL", "problem")]


def test_a_gpu_that_torch_cannot_use(found, tmp_path):
    (old,) = gpus.gpus(found, smi(tmp_path, "echo 450.1"))
    assert_problem(old, "450.1", "13.0", "update the driver")
    (cpu,) = gpus.gpus(found | {"built_for": None}, smi(tmp_path, "echo 580.65"))
    assert_problem(cpu, "CPU only")
    (dead,) = gpus.gpus(found, smi(tmp_path, "echo 'Failed to initialize NVML' >&2; exit 9"))
    assert_problem(dead, "Failed to initialize NVML")


def test_a_container_that_lacks_its_driver(found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia0").touch()
    (finding,) = gpus.gpus(found, devices=tmp_path)
    assert_problem(finding, "--gpus all")
