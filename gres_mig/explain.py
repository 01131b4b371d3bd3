"""Why a request fits or does not: what each GPU would give it, who is in the way, and whose end would make room."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from gres_mig import placement, rooms, slices
from gres_mig.errors import NoCapacity, NodeFault
from gres_mig.models import Gpu, Instance, Placement, Profile, Record, Release, Request, Settings, State
from gres_mig.placement import Choice, Room
from gres_mig.sizes import format_mib
from gres_mig.values import Value, replace
from gres_mig.view import Holding, View, holdings


class Offer(Value):
    """What one GPU has for a request."""

    gpu: Gpu
    closed: str
    """Why it takes no new work; empty when it does."""
    profiles: tuple[Profile, ...] = ()
    """What the request would get there, or any of what it could; none where no allowed profile could ever hold it."""
    free: tuple[Placement, ...] = ()
    """Their places that nothing holds."""
    fits: bool = False
    but: str = ""
    """Why it does not fit though places are free."""
    room_mib: int = 0
    """The largest slice that a shared GPU has room for."""
    in_the_way: tuple[Holding, ...] = ()
    makes_room: tuple[Record, ...] = ()
    """The fewest records whose end would make room there; empty where no record's end would."""

    @property
    def places(self) -> tuple[Placement, ...]:
        """All places of those profiles, each once."""
        return tuple(dict.fromkeys(place for profile in self.profiles for place in profile.placements))

    @property
    def said(self) -> Iterator[str]:
        """What it has for the request, in words."""
        if self.closed:
            yield f"takes no new work: {self.closed}"
        if not self.profiles:
            # Where it could not be read at all, that is all there is to say.
            yield from [] if self.closed else ["no profile that is allowed here could ever hold it"]
            return
        if self.gpu.sliced:
            limit = self.gpu.backend or "none"
            yield f"would take a slice, isolation={limit}: there is room for one of {format_mib(self.room_mib)}"
            return
        names = " or ".join(profile.name for profile in self.profiles)
        free = " ".join(map(str, self.free))
        number = f"{len(self.free)} of {len(self.places)} places free"
        but = f", but {self.but}" if self.but else ""
        memory = format_mib(self.profiles[0].memory_mib)
        yield f"would take {names}, {memory}: {f'{number}: {free}' if free else number}{but}"


class Answer(Value):
    """Whether a request fits the node now, and what each GPU that it may go to says."""

    request: Request
    choice: Choice | None
    refusal: NoCapacity | None
    """Why there is no room; exactly one of the two is there."""
    offers: tuple[Offer, ...]

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.choice is None:
            assert self.refusal is not None
            return self.refusal.message
        if self.choice.slice:
            return f"{self.request} fits: a slice of {self.choice.gpu_uuid}, isolation={self.choice.slice}"
        profile, where = self.choice.profile, self.choice.placement
        memory = format_mib(profile.memory_mib)
        return f"{self.request} fits: {profile.name} ({memory}) at {where} of {self.choice.gpu_uuid}"


def why(view: View, request: Request, settings: Settings) -> Answer:
    """The answer that an ask would get now; raises what no end of anything could mend, as the ask would."""
    choice, refusal = None, None
    here = [rooms.room(gpu, view.state) for gpu in view.gpus if settings.manages(gpu)]
    try:
        choice = rooms.best(here, request, settings)
    except NoCapacity as error:
        refusal = error
    wanted = {name.lower() for name in request.gpus}
    asked = [room for room in here if not wanted or {room.gpu.uuid.lower(), room.gpu.pci_bus_id.lower()} & wanted]
    return Answer(request, choice, refusal, tuple(_offer(view, room, request, settings) for room in asked))


def _offer(view: View, room: Room, request: Request, settings: Settings) -> Offer:
    could = tuple(profile for tier in placement.tiers(room.gpu, request, settings) for profile in tier)
    if room.gpu.sliced and not request.profile and not request.isolation:
        most_mib = slices.capacity_mib(room.gpu, settings) - slices.overhead_mib(room.gpu, settings)
        could = (slices.profile(request.memory_mib),) if request.memory_mib <= most_mib else ()
    choice = _choice(room, request, settings) if could else None
    offer = Offer(room.gpu, room.closed, (choice.profile,) if choice else could, fits=choice is not None)
    held = holdings(view, room.gpu)
    offer = replace(
        offer,
        free=tuple(place for place in offer.places if not place.mask & room.taken),
        in_the_way=tuple(h for h in held if any(h.placement.overlaps(place) for place in offer.places)),
    )
    if room.gpu.sliced:
        in_the_way = () if offer.fits or not could else held
        offer = replace(offer, in_the_way=in_the_way, room_mib=slices.largest_mib(room, settings))
    if choice or room.closed or not offer.profiles:
        return offer
    but = ""
    if offer.free:
        full = all(profile.id in room.full for profile in offer.profiles)
        but = "the driver has none left" if full else f"the reserve of {settings.reserve_mib:,} MiB leaves no memory"
    return replace(offer, but=but, makes_room=_makes_room(view.state, room.gpu, request, settings))


def _choice(room: Room, request: Request, settings: Settings) -> Choice | None:
    try:
        return rooms.best([room], replace(request, gpus=()), settings)
    except (NoCapacity, NodeFault):
        return None


def _makes_room(state: State, gpu: Gpu, request: Request, settings: Settings) -> tuple[Record, ...]:
    """Tried with the product's own choice, so that places, reserve and allow-list all count."""
    records = [r for r in state.records if r.gpu_uuid == gpu.uuid]
    if gpu.sliced:
        return slices.makes_room(rooms.room(gpu, state), records, request, settings)
    for number in range(1, len(records) + 1):
        enough = [
            ending
            for ending in combinations(records, number)
            if _choice(_room_without(state, gpu, ending), request, settings)
        ]
        if enough:
            return min(enough, key=_loss)
    return ()


def _loss(ending: tuple[Record, ...]) -> tuple[int, int, int]:
    """A stuck one does not end when its owner likes; else the less memory goes, the better."""
    stuck = sum(isinstance(r, Release) and r.stuck is not None for r in ending)
    return stuck, sum(r.memory_mib for r in ending), min(r.placement.start for r in ending)


def _room_without(state: State, gpu: Gpu, ending: tuple[Record, ...]) -> Room:
    nonces = {record.nonce for record in ending}
    left = replace(state, records=tuple(r for r in state.records if r.nonce not in nonces))
    instances = tuple(i for i in gpu.instances if not any(rooms.covers(r, i) for r in ending))
    # What the driver says is full is full with all that is there; then only the number of its kind can limit.
    full = frozenset(
        p.id for p in gpu.profiles if p.id in gpu.full_profiles and _number(instances, p) >= p.instance_count
    )
    return rooms.room(replace(gpu, instances=instances, full_profiles=full), left)


def _number(instances: tuple[Instance, ...], profile: Profile) -> int:
    return sum(instance.profile_id == profile.id for instance in instances)
