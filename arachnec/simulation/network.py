"""What activities share while they run: links, and the cores of a node.

An activity is a transfer, a cascade or a sum of gradients. It takes time of its own, time on cores, and time on sets of
links, one set after another; the busiest link of a set makes its pace. A link gives its users equal parts, and what a
user cannot take, because another link holds it back, to the others (max-min fairness). A transfer uses its links all
the time; a cascade uses them for the part of its time that is communication, and to the others it counts as that part
of a user. For users that never pause this is fair sharing; for others it is mean-value analysis of a shared server
(Schweitzer's approximation, 1979).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

LinkName = Hashable
Load = tuple[tuple[float, tuple[LinkName, ...]], ...]  # ms for which each of some links is needed, (ms, links) by ms

SMALLEST = 1e-3  # change in the users of a link that the others on it are told of
NEWS = 2e-3  # the same, for each of many users
SWEEPS = 8  # pace and use of activities follow from each other; they settle quickly
ROUNDING = 1e-9  # users of a link that are none; part of a time that is no change
HELD_BACK = 0.999  # of its pace, above which a link is the one that makes it


@dataclass(frozen=True)
class Work:
    """What an activity takes when it is alone, ms.

    ``computing`` counts its busy ranks by node, each of which wants one core for ``compute`` ms. ``loads`` follow one
    another.
    """

    fixed: float = 0.0
    compute: float = 0.0
    computing: tuple[tuple[int, int], ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether others can slow it down."""
        return bool(self.loads or self.computing)

    @property
    def alone(self) -> float:
        return self.fixed + self.compute + sum(max(ms for ms, _ in load) for load in self.loads)


Held = tuple[float, float]  # users of a link that other links hold back, and the part of the link that they take
NOBODY: Held = (0.0, 0.0)


@dataclass(eq=False)
class Activity:
    """Work under way. ``end`` holds as long as nobody else starts or ends; ``version`` counts the changes."""

    work: Work
    what: object
    since: float  # ms, when ``left`` was true
    left: float = 1.0  # of the work
    takes: float = 0.0  # ms for the whole work at the present pace
    version: int = 0
    computes: float = 0.0  # part of its time that it is on cores
    uses: list[float] = field(default_factory=list)  # part of its time that it is on each of ``work.loads``
    held: dict[LinkName, Held] = field(default_factory=dict)  # on links that do not make its pace

    @property
    def end(self) -> float:
        return self.since + self.left * self.takes


@dataclass
class Network:
    """The activities under way. After all that starts or ends at one time, ``settle`` gives those whose end has moved.

    ``cores`` are those of a node; None where computing shares nothing.
    """

    cores: float | None = None
    _on: dict[LinkName, dict[Activity, None]] = field(default_factory=lambda: defaultdict(dict))
    _used: dict[LinkName, float] = field(default_factory=lambda: defaultdict(float))  # by so many; or cores wanted
    _held: dict[LinkName, Held] = field(default_factory=dict)  # those of ``_used`` that other links hold back
    _told: dict[LinkName, tuple[float, Held]] = field(default_factory=dict)  # both as when its users were paced
    _changed: dict[LinkName, float] = field(default_factory=lambda: defaultdict(float))  # by how much, to and fro
    _started: list[Activity] = field(default_factory=list)
    _ended: bool = False  # whether anything has, since all was settled

    def start(self, activity: Activity) -> None:
        work = activity.work
        activity.takes = work.alone
        activity.uses = [0.0] * len(work.loads)
        for link in self._links(work):
            self._on[link][activity] = None
        self._use(activity, [max(ms for ms, _ in load) for load in work.loads], work.compute)
        self._started.append(activity)

    def finish(self, activity: Activity) -> None:
        self._ended = True
        self._use(activity, [0.0] * len(activity.uses), 0.0)
        self._hold(activity, {})
        for link in self._links(activity.work):
            del self._on[link][activity]

    def settle(self, now: float) -> list[Activity]:
        """Give every activity the pace that its links and cores allow; those that started or changed."""
        if not (self._started or self._ended):
            return []  # what has not settled in SWEEPS may never do
        moved: dict[Activity, None] = dict.fromkeys(self._started)
        found: dict[Activity, None] = dict(moved)
        self._started.clear()
        self._ended = False
        for sweep in range(SWEEPS):
            for link in self._news(within=sweep > 0):
                moved.update(self._on[link])
            if not moved:
                return list(found)
            for activity in moved:
                if self._pace(activity, now):
                    found[activity] = None
            moved = {}
        for link in self._changed:  # what has not settled is news to whoever comes next
            self._told.pop(link, None)
        return list(found)

    def _news(self, *, within: bool) -> list[LinkName]:
        """The links whose users have to be paced anew, noted as told.

        Before the first sweep only what a link has come to counts: one that ends and one that begins may cancel out.
        ``within`` the sweeps users were paced one after another, some by what the link was meanwhile.
        """
        changed, self._changed = self._changed, defaultdict(float)
        found: list[LinkName] = []
        for link, change in changed.items():
            if not self._on[link]:
                del self._on[link], self._used[link]
                self._told.pop(link, None)
                continue
            used, (users, part) = self._told.get(link, (0.0, NOBODY))
            now, held = self._used[link], self._held.get(link, NOBODY)
            most = max(abs(now - used), abs(held[0] - users), abs(held[1] - part), change if within else 0.0)
            if most > max(SMALLEST, NEWS * now):
                self._told[link] = now, held
                found.append(link)
        return found

    def _links(self, work: Work) -> Iterator[LinkName]:
        for load in work.loads:
            for _, links in load:
                yield from links
        if self.cores is not None:
            for node, _ in work.computing:
                yield "cores", node

    def _pace(self, activity: Activity, now: float) -> bool:
        """How long the whole activity takes as things stand, and whether that is another time than before."""
        work = activity.work
        computing = work.compute * self._crowding(activity)
        sending = [
            max(self._sending(activity, ms, links, use) for ms, links in load)
            for load, use in zip(work.loads, activity.uses, strict=True)
        ]
        takes = work.fixed + computing + sum(sending)
        changed = abs(takes - activity.takes) > ROUNDING * takes
        if changed:
            if activity.takes > 0:  # what it has done so far was at the old pace
                activity.left = max(0.0, activity.left - (now - activity.since) / activity.takes)
            activity.since = now
            activity.version += 1
            activity.takes = takes
        self._use(activity, sending, computing)
        self._hold(activity, self._held_back(activity, sending))
        return changed

    def _sending(self, activity: Activity, ms: float, links: tuple[LinkName, ...], use: float) -> float:
        """What takes ``ms`` on each of the links alone, ``use`` of the users being the activity itself."""
        if self._held.keys().isdisjoint(links):
            return ms * (1.0 - use + max(map(self._used.__getitem__, links)))
        return ms * max(self._slowness(activity, link, use) for link in links)

    def _slowness(self, activity: Activity, link: LinkName, use: float) -> float:
        """How many equal parts the link is in, of which the activity takes one."""
        users = 1.0 - use + self._used[link]
        if link not in self._held:
            return users
        (held, part), (own, taken) = self._held[link], activity.held.get(link, NOBODY)
        left, free = 1.0 - part + taken, users - held + own
        return users if left * users <= free else free / left

    def _held_back(self, activity: Activity, sending: list[float]) -> dict[LinkName, Held]:
        """What the activity takes of the links that it shares and that do not make its pace."""
        found: dict[LinkName, Held] = {}
        for load, whole, use in zip(activity.work.loads, sending, activity.uses, strict=True):
            for ms, links in load:
                for link in links:
                    if len(self._on[link]) > 1 and ms * self._slowness(activity, link, use) < HELD_BACK * whole:
                        found[link] = use, use * ms / whole
        return found

    def _hold(self, activity: Activity, held: dict[LinkName, Held]) -> None:
        for link in {**activity.held, **held}:
            (users, part), (before, taken) = held.get(link, NOBODY), activity.held.get(link, NOBODY)
            if users == before and part == taken:
                continue
            self._changed[link] += max(abs(users - before), abs(part - taken))
            others, rest = self._held.get(link, NOBODY)
            if others + users - before > ROUNDING:
                self._held[link] = others + users - before, rest + part - taken
            else:
                self._held.pop(link, None)
        activity.held = held

    def _crowding(self, activity: Activity) -> float:
        """By how much its computing is slower than with a core for every rank: equal parts of the node's cores."""
        if self.cores is None:
            return 1.0
        wanted = (
            ranks * (1.0 - activity.computes) + self._used["cores", node] for node, ranks in activity.work.computing
        )
        return max(1.0, max(wanted, default=0.0) / self.cores)

    def _use(self, activity: Activity, sending: list[float], computing: float) -> None:
        """Which part of its time the activity is on its links and cores."""
        whole = activity.takes if activity.takes > 0 else 1.0
        for place, (load, ms) in enumerate(zip(activity.work.loads, sending, strict=True)):
            change = ms / whole - activity.uses[place]
            if change:
                activity.uses[place] += change
                for _, links in load:
                    for link in links:
                        self._used[link] += change
                        self._changed[link] += abs(change)
        change = computing / whole - activity.computes
        if change and self.cores is not None:
            activity.computes += change
            for node, ranks in activity.work.computing:
                self._used["cores", node] += ranks * change
                self._changed["cores", node] += ranks * abs(change)
