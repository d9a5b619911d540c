"""Two hosts on this machine, joined by a network that loses, delays and reorders packets.

    python benchmarks/bad_network.py [--loss 1] [--delay 2 1] [--reorder 5] [--cut 60] WORDS...

Runs `python WORDS...` on two ranks, one on each host; the exit code is mpirun's. The hosts are two
network namespaces that share no memory. Their ranks reach each other by a TUN device on each host,
between which this process carries the packets; `mpirun` has a cable of its own. Needs root, `ip`
and /dev/net/tun, and no `netem`. Prints what the network carried.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from dpfl_mpi.mpi.launcher import OPEN_MPI

LIBC = ctypes.CDLL(None, use_errno=True)
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # of linux/if_tun.h
HOSTS = [f"dpfl{os.getpid()}{letter}" for letter in "ab"]
PACKET = 65536  # bytes, at most
BURST = 64  # packets of one host before the other's turn


def ip(words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check, stderr=None if check else -3)


def make_hosts() -> list[int]:
    """Make the hosts and their two networks; return the TUN device of each."""
    here, devices = os.open("/proc/self/ns/net", os.O_RDONLY), []
    for host in HOSTS:
        ip(f"netns add {host}")
        there = os.open(f"/run/netns/{host}", os.O_RDONLY)
        LIBC.setns(there, 0)  # a device is of the namespace that its process is in
        devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", b"bad", IFF_TUN | IFF_NO_PI))
        LIBC.setns(here, 0)
    ip(f"-n {HOSTS[0]} link add good type veth peer name good netns {HOSTS[1]}")
    for number, host in enumerate(HOSTS, 1):
        for device, net in (("good", 91), ("bad", 92)):
            ip(f"-n {host} addr add 10.{net}.0.{number}/24 dev {device}")
            ip(f"-n {host} link set {device} up")
        ip(f"-n {host} link set lo up")
    return devices


class Network:
    """Carries packets between the devices in a thread, and counts them."""

    def __init__(self, devices: list[int], options: argparse.Namespace):
        self.options, self.start = options, time.monotonic()
        self.packets = self.bytes = self.lost = self.overtook = self.cut = 0
        self.way = dict(zip(devices, devices[::-1], strict=True))
        threading.Thread(target=self.carry, daemon=True).start()

    def carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when, number, where to, what
        last = dict.fromkeys(self.way, 0.0)
        while True:
            wait = max(0, waiting[0][0] - time.monotonic()) if waiting else None
            for device in select.select([*self.way], [], [], wait)[0]:
                self.read(device, waiting, last)
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                os.write(device, packet)

    def read(self, device: int, waiting: list, last: dict[int, float]) -> None:
        now, options = time.monotonic(), self.options
        for _ in range(BURST):
            try:
                packet = os.read(device, PACKET)
            except BlockingIOError:
                return
            if options.cut and 0 <= now - self.start - options.cut[0] < options.cut[1]:
                self.cut += 1
                continue
            self.packets, self.bytes = self.packets + 1, self.bytes + len(packet)
            if 100 * random.random() < options.loss:
                self.lost += 1
                continue
            due = now
            if 100 * random.random() < options.reorder and last[device] > now:
                self.overtook += 1
            else:
                mean, spread = options.delay
                due = max(last[device], now + random.uniform(mean - spread, mean + spread) / 1e3)
                last[device] = due
            heapq.heappush(waiting, (due, self.packets, self.way[device], packet))


def command(words: list[str]) -> list[str]:
    """Return the command of `python WORDS...` on both hosts, under the MPI in PATH."""
    shell = Path(__file__).parents[1] / "tests/slurm/rsh.sh"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    start = f"mpirun -launcher ssh -launcher-exec {shell} -iface good -ppn 1"
    start += " -hosts 10.91.0.1,10.91.0.2"
    if "Open MPI" in version:
        start = f"mpirun --prtemca plm_ssh_agent {shell} --prtemca prte_if_include good"
        start += " --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include bad --map-by node"
        start += " --host 10.91.0.1:1,10.91.0.2:1"
    inside = ["ip", "netns", "exec", HOSTS[0], *start.split(), "-n", "2"]
    return [*inside, sys.executable, *words]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--loss", type=float, default=0, help="percent of the packets")
    parser.add_argument("--delay", type=float, nargs=2, default=(0, 0), help="mean and spread, ms")
    parser.add_argument("--reorder", type=float, default=0, help="percent that overtake others")
    parser.add_argument("--cut", type=float, nargs=2, help="when, and for how long, seconds")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    net = {"UCX_NET_DEVICES": "bad", "FI_TCP_IFACE": "bad", "FI_PROVIDER": "tcp"}
    hosts = " ".join(f"10.91.0.{number}={host}" for number, host in enumerate(HOSTS, 1))
    env = os.environ | OPEN_MPI | net | {"DPFL_HOSTS": hosts, "OMP_NUM_THREADS": "1"}
    try:
        network = Network(make_hosts(), options)
        start = time.monotonic()
        code = subprocess.run(command(options.words), env=env).returncode
        print(
            f"exit code {code} after {time.monotonic() - start:.1f} s; carried "
            f"{network.packets} packets, {network.bytes / 1e6:.1f} MB; {network.lost} lost, "
            f"{network.overtook} overtook others, {network.cut} while cut"
        )
        return code
    finally:
        for host in HOSTS:
            ip(f"netns del {host}", check=False)


if __name__ == "__main__":
    sys.exit(main())
