"""Which variables of the caller's environment are passed into a container."""

from __future__ import annotations

from sqshforge.run import passed
from sqshforge.run.container import merged_environment

GOES_IN = (
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURMD_NODENAME", "PMI_RANK", "PMIX_RANK", "MASTER_ADDR"),
    *(
        "NODES",
        "CHECKPOINTS",
        "IMAGE",
        "REQUEUES",
        "SPARES",
        "SHRINK",
        "INSTANCE_TYPE",
        "NPROC_PER_NODE",
        "NUMA_BIND",
    ),
    *("GPUS_PER_NODE", "PREFLIGHT", "PREFLIGHT_SECONDS", "NSYS", "NSYS_RANKS", "TRAINING_OPS"),
    *(
        "NCCL_DEBUG",
        "FI_PROVIDER",
        "FI_LOG_LEVEL",
        "OFI_NCCL_PROTOCOL",
        "GLOO_SOCKET_IFNAME",
        "NEURON_CC_FLAGS",
    ),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_BLOCKING_WAIT", "TORCHINDUCTOR_DIR"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR", "HF_TOKEN", "WANDB_API_KEY", "AWS_REGION"),
    *("http_proxy", "HTTPS_PROXY", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
    *("LANG", "LC_ALL", "TZ"),
)
STAYS_OUT = (
    *("PATH", "HOME", "USER", "SHELL", "PWD", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH"),
    *("LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CUDA_HOME", "PYTORCH_VERSION"),
    *("ENROOT_ROOTFS", "BASH_ENV", "SLURM", "NSYSTEMS", "IMAGES", "My_NODES"),
)


def test_the_job_the_machine_and_the_services_go_in_and_the_host_s_files_do_not() -> None:
    everything = dict.fromkeys((*GOES_IN, *STAYS_OUT), "x")
    assert passed.names(everything) == sorted(GOES_IN)


def test_each_entry_says_why_and_is_a_name_or_its_beginning() -> None:
    """Launchers are generated from the patterns, which must mean the same in a shell."""
    patterns = [pattern for one in passed.PASSED for pattern in one.patterns]
    assert len(patterns) == len(set(patterns))
    assert all(passed.is_name(pattern.removesuffix("*")) for pattern in patterns)
    assert all(one.why for one in passed.PASSED)


def test_names_that_no_shell_has_are_left_out() -> None:
    assert passed.names({"SLURM_A-B": "1", "NCCL_%%": "1", "SLURM_É": "1", "SLURM_A": "1"}) == [
        "SLURM_A"
    ]


def test_what_goes_into_every_container_wins_over_the_image_and_the_request_over_both() -> None:
    host = {"NCCL_DEBUG": "INFO", "COLOUR": "host", "TZ": "UTC"}
    image = "NCCL_DEBUG=WARN\nCOLOUR=image\nFI_PROVIDER=efa\nTZ=CET\n"
    merged = merged_environment(host, image, {"TZ": "EST"})
    wanted = {"NCCL_DEBUG": "INFO", "COLOUR": "image", "FI_PROVIDER": "efa", "TZ": "EST"}
    assert merged == wanted


def test_the_host_s_python_is_not_the_image_s() -> None:
    """A PYTHONHOME set by a module system would keep the image's Python from starting."""
    host = {"PYTHONHOME": "/apps/python", "COLOUR": "host"}
    assert merged_environment(host, "", {}) == {"COLOUR": "host"}
    assert "PYTHONHOME" in merged_environment(host, "PYTHONHOME=/usr", {})
    assert "PYTHONHOME" in merged_environment(host, "", {"PYTHONHOME": "/usr"})
