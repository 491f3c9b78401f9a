"""Which system this is: its name, kernel, and what stands between it and the hardware."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass

from budget.tree import Tree

_MACHINES = (
    "qemu",
    "kvm",
    "vmware",
    "virtualbox",
    "bochs",
    "xen",
    "parallels",
    "virtual machine",
    "openstack",
    "bhyve",
)
"""What firmware of a virtual machine calls itself, in small letters."""
_CONTAINER = re.compile(r"/docker[-/]|/lxc[./]|/kubepods[./]|/libpod[-_]|/machine\.slice/|/garden/")
"""Control groups of the usual container managers."""


@dataclass(frozen=True)
class System:
    """`environment` names what hides most: wsl2, then vm, then container, then bare; windows for a native one. None
    where nothing tells. `notes` says what it leaves out."""

    os: str | None
    kernel: str | None
    environment: str | None
    notes: str = ""


def read_system(tree: Tree) -> System:
    if tree.live and sys.platform != "linux":
        return System(platform.platform(), platform.release(), "windows" if sys.platform == "win32" else None)
    kernel = tree.line("proc/sys/kernel/osrelease")
    cpuinfo = tree.text("proc/cpuinfo")
    container = _is_container(tree)
    if kernel is not None and "microsoft" in kernel.lower():
        # Both generations of WSL say so; only the second has a kernel of its own, and only it has GPUs.
        environment: str | None = "wsl2"
    elif _is_virtual(tree, cpuinfo or ""):
        environment = "vm"
    elif container:
        environment = "container"
    else:
        environment = None if cpuinfo is None else "bare"
    notes = "in a container" if container and environment in ("wsl2", "vm") else ""
    return System(_os_name(tree), kernel, environment, notes)


def _os_name(tree: Tree) -> str | None:
    text = tree.text("etc/os-release") or tree.text("usr/lib/os-release") or ""
    for field in ("PRETTY_NAME", "NAME"):
        match = re.search(rf"^{field}=(.*)$", text, re.M)
        if match and (name := match.group(1).strip().strip("\"'")):
            return name
    return None


def _is_virtual(tree: Tree, cpuinfo: str) -> bool:
    """The hypervisor's own flag on x86; elsewhere what the firmware calls the machine."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)
    if flags:
        return "hypervisor" in flags.group(1).split()
    fields = ("sys_vendor", "product_name", "board_vendor")
    firmware = " ".join(tree.line(f"sys/class/dmi/id/{field}") or "" for field in fields).lower()
    tree_model = (tree.line("proc/device-tree/model") or tree.line("proc/device-tree/compatible") or "").lower()
    return any(word in firmware for word in _MACHINES) or "dummy-virt" in tree_model


def _is_container(tree: Tree) -> bool:
    if any(tree.there(name) for name in (".dockerenv", "run/.containerenv", "run/systemd/container")):
        return True
    return any(_CONTAINER.search(tree.text(name) or "") for name in ("proc/self/cgroup", "proc/1/cgroup"))
