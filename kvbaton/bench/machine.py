"""Whose CPU time a machine spent during a run: ours, other programs', or the hypervisor's.

``busy`` comes from /proc/stat; ``own`` is this process (the client) and the fleet it started, by walking the process
tree; what is left of busy is others'. Steal is time the hypervisor gave to other guests. Kernel threads and interrupts
count as others': loopback traffic costs some, so the limits leave room for it.

Where there is no /proc (not Linux) nothing is known, and that is said. Where the server is not a child of this process
its time cannot be told from others', so only steal is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

PROC = Path("/proc")
# Mean cores that other programs may use during a run. A page of kernel work and a shell are below it, a build is above.
MAX_OTHER_CORES = 0.25
MAX_STEAL_CORES = 0.10


class MachineUse(msgspec.Struct, frozen=True):
    """Mean cores in use over a run. None: it could not be told."""

    num_cores: int
    own_cores: float | None
    other_cores: float | None
    steal_cores: float | None

    def doubts(self, max_other: float = MAX_OTHER_CORES, max_steal: float = MAX_STEAL_CORES) -> list[str]:
        found = []
        if self.other_cores is not None and self.other_cores > max_other:
            found.append(f"other programs used {self.other_cores:.2f} of {self.num_cores} cores (limit {max_other:g})")
        if self.steal_cores is not None and self.steal_cores > max_steal:
            found.append(f"the hypervisor took {self.steal_cores:.2f} of {self.num_cores} cores (limit {max_steal:g})")
        return found


class _Look(msgspec.Struct, frozen=True):
    at_s: float
    busy_s: float
    steal_s: float
    own_s: dict[int, float]  # CPU seconds by process, its ended children included


class MachineWatch:
    """From its creation to ``end``. ``fleet_pid`` is the root of the processes that serve; None: they run elsewhere."""

    def __init__(self, fleet_pid: int | None, proc: Path = PROC) -> None:
        self._fleet_pid = fleet_pid
        self._proc = proc
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._before = self._look()

    def end(self) -> MachineUse:
        before, after = self._before, self._look()
        cores = os.cpu_count() or 1
        if before is None or after is None or after.at_s <= before.at_s:
            return MachineUse(cores, None, None, None)
        wall_s = after.at_s - before.at_s
        steal = (after.steal_s - before.steal_s) / wall_s
        if self._fleet_pid is None:
            return MachineUse(cores, None, None, steal)
        # A process that came in between began from nothing; one that is gone was counted by the parent that waited.
        own_s = sum(used - before.own_s.get(pid, 0.0) for pid, used in after.own_s.items())
        own = own_s / wall_s
        return MachineUse(cores, own, max(0.0, (after.busy_s - before.busy_s) / wall_s - own), steal)

    def _look(self) -> _Look | None:
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(field) * self._tick_s for field in fields[:8])
        own = self._own() if self._fleet_pid is not None else {}
        return _Look(time.monotonic(), user + nice + system + irq + softirq, steal, own)

    def _own(self) -> dict[int, float]:
        parents: dict[int, int] = {}
        used: dict[int, float] = {}
        for entry in self._proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # The name in brackets may hold anything, so the fields begin after its last bracket.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended just now
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            used[pid] = sum(int(fields[place]) for place in (11, 12, 13, 14)) * self._tick_s
        ours = {os.getpid()}
        if self._fleet_pid in used:
            ours |= {pid for pid in used if self._descends(pid, parents)}
        own = {pid: used[pid] for pid in ours if pid in used}
        # The client's ended children are tools and earlier fleets, not this run.
        times = os.times()
        own[os.getpid()] = times.user + times.system
        return own

    def _descends(self, pid: int, parents: dict[int, int]) -> bool:
        seen = 0
        while pid > 1 and seen < 64:
            if pid == self._fleet_pid:
                return True
            pid, seen = parents.get(pid, 0), seen + 1
        return False
