"""Who takes part in which step: simulated, with the real pages and without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec, uniform_layouts
from localkv.engine.prefix import PrefixCache, Text
from localkv.engine.scheduler import (
    LEAST_SHARE,
    LEAST_TOKENS,
    PIECE,
    CostModel,
    Part,
    Request,
    Scheduler,
    SchedulerConfig,
    StepShape,
    pairs,
)
from localkv.engine.step_runner import RequestRows
from localkv.kernels.cpu.arrays import NumpyArrays

N_CTX = 4096
CHEAP = StepShape(1, 0, 0)


def true_cost(shape: StepShape) -> float:
    """Milliseconds of the simulated machine."""
    rows, pairs = shape.n_rows / 1000, shape.n_pairs / 1000
    return 15 + 2 * shape.n_generating + 2 * shape.n_prompt + rows + 0.6 * pairs


def new_cache(n_pages: int, n_sequences: int = 64) -> KVCache:
    layouts = uniform_layouts(
        n_layers=1, n_kv_heads=1, head_dim=1, segments=[SegmentSpec("f16", "f16")]
    )
    return KVCache(
        layouts,
        n_ctx=N_CTX,
        arrays=NumpyArrays(),
        n_sequences=n_sequences,
        n_tokens=n_pages * PAGE_TOKENS,
    )


def next_token(ids: list[int]) -> int:
    """What the simulated model draws: it depends on all tokens."""
    return hash(tuple(ids)) % 1000


@dataclass
class Simulation:
    """A machine that runs the scheduler's steps; `now` is its clock, in seconds.

    Attributes:
        n_new: of each request, the tokens to draw.
        first, gaps: of each, when its first token came, and the longest time between two.
        steps: milliseconds of each, and its parts.
    """

    n_pages: int = 64
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cost: Callable[[StepShape], float] = true_cost
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cache = new_cache(self.n_pages)
        self.rows = RequestRows(self.cache, PrefixCache(self.cache, exact=True))
        self.scheduler = Scheduler(self.rows, self.config)
        self.n_new = dict[Request, int]()
        self.first = dict[Request, float]()
        self.last = dict[Request, float]()
        self.gaps = dict[Request, float]()
        self.steps = list[tuple[float, list[Part]]]()

    def add(self, ids: list[int], n_new: int, priority: int = 0, **limits: float) -> Request:
        text = Text(list(ids), len(ids))
        most = len(ids) + n_new
        request = Request(len(self.n_new), text, self.now, most, priority=priority, **limits)
        self.n_new[request] = n_new
        self.scheduler.add(request)
        return request

    def step(self) -> list[Part]:
        for request in self.scheduler.overdue(self.now):
            self.scheduler.end(request)
        alone = self.scheduler.next_alone()
        parts = self.scheduler.step(self.now)
        assert alone is None or parts == [alone]
        shape = self.scheduler.shape(parts)
        taken = self.cost(shape)
        if not parts:
            return parts
        for part in parts:  # whose pages a batch reserves once more
            assert self.rows.reserve(part.request, part.n_tokens)
        self.steps.append((taken, parts))
        self.now += taken / 1000
        self.scheduler.cost.learn(shape, taken)
        assert len({part.request for part in parts}) == len(parts)
        for part in parts:
            request = part.request
            assert 0 < part.n_tokens <= request.n_alike
            self.rows.hold(request, part.n_tokens)
            if request.n_missing:
                continue
            if request in self.last:
                gap = self.now - self.last[request]
                self.gaps[request] = max(gap, self.gaps.get(request, 0.0))
            else:
                self.first[request] = self.now
            self.last[request] = self.now
            request.text.ids.append(next_token(request.text.ids))
            if len(request.text.ids) - request.n_prompt == self.n_new[request]:
                self.scheduler.end(request)
        self.check()
        return parts

    def run(self, most: int = 100_000) -> None:
        """Until nobody is left."""
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step()
            assert len(self.steps) < most

    def check(self) -> None:
        """Each page is free, or held by as many sequences as the pool counts."""
        for i, pool in enumerate(self.cache.pools):
            held = [page for sequence in self.cache.known() for page in sequence.held(i)]
            assert [held.count(page) for page in range(pool.n_pages)] == pool.n_holders
            assert len(pool.free) == pool.n_pages - len({*held})


def expected(ids: list[int], n_new: int) -> list[int]:
    ids = list(ids)
    for _ in range(n_new):
        ids.append(next_token(ids))
    return ids


def random_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(n)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_are_served_and_all_pages_come_back(data: st.DataObject) -> None:
    """Requests of any lengths, at any time, some cancelled, some alike, in a cache that holds few
    of them."""
    n_pages = data.draw(st.integers(4, 12))
    config = SchedulerConfig(data.draw(st.integers(1, 6)), n_batch=128, step_ms=60)
    simulation = Simulation(n_pages, config)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    most = n_pages * PAGE_TOKENS
    texts, cancelled, wanted = [random_ids(rng, 300)], set(), {}
    for _ in range(data.draw(st.integers(1, 12))):
        base = rng.choice(texts)
        ids = base[: rng.randrange(len(base))] + random_ids(rng, rng.randint(1, 500))
        n_new = rng.randint(1, 40)
        ids = ids[: most - n_new]
        texts.append(ids)
        request = simulation.add(ids, n_new, priority=rng.randrange(2))
        wanted[request] = expected(ids, n_new)
        for _ in range(rng.randrange(4)):
            simulation.step()
        if rng.random() < 0.2:
            victim = rng.choice(list(wanted))
            if victim.state != "done":
                simulation.scheduler.end(victim)
                cancelled.add(victim)
                simulation.check()
    simulation.run()
    for request, ids in wanted.items():
        assert request.state == "done"
        if request not in cancelled:
            assert request.text.ids == ids
    simulation.rows.prefixes.clear()
    assert all(len(pool.free) == pool.n_pages for pool in simulation.cache.pools)


@pytest.mark.parametrize("seed", [1, 98, *range(200, 210)])
def test_pages_that_are_shared_after_they_were_reserved(seed: int) -> None:
    """Texts that begin alike, and end a little later than others that run; in few pages. The first
    two seeds let one begin in a page that another had reserved, where there was none for a copy."""
    rng = random.Random(seed)
    n_pages = rng.randint(2, 6)
    config = SchedulerConfig(rng.randint(2, 8), rng.choice([64, 512]), rng.choice([1, 20, 60]))
    simulation, base = Simulation(n_pages, config), random_ids(rng, 300)
    wanted = {}
    for _ in range(rng.randint(2, 14)):
        start = base[: rng.randrange(len(base))]
        ids = start + random_ids(rng, rng.randint(1, 3 if rng.random() < 0.6 else 200))
        ids = ids[: n_pages * PAGE_TOKENS - 40]
        request = simulation.add(ids, rng.randint(1, 40))
        wanted[request] = expected(ids, simulation.n_new[request])
        for _ in range(rng.randrange(6)):
            simulation.step()
    simulation.run()
    assert all(request.text.ids == ids for request, ids in wanted.items())


@pytest.mark.slow
def test_hundreds_of_requests_in_a_cache_for_a_tenth() -> None:
    rng = random.Random(4)
    simulation = Simulation(30, SchedulerConfig(32, step_ms=120))
    lengths = [min(1500, int(rng.expovariate(1 / 220)) + 1) for _ in range(300)]
    assert sum(lengths) > 8 * 30 * PAGE_TOKENS
    wanted, ended = {}, set()
    for n in lengths:
        ids = random_ids(rng, n)
        request = simulation.add(ids, rng.randint(1, 60))
        wanted[request] = expected(ids, simulation.n_new[request])
        while rng.random() < 0.5:
            simulation.step()
        if rng.random() < 0.05 and request.state != "done":
            simulation.scheduler.end(request)
            ended.add(request)
    simulation.run()
    assert all(request in ended or request.text.ids == ids for request, ids in wanted.items())
    simulation.rows.prefixes.clear()
    assert all(len(pool.free) == pool.n_pages for pool in simulation.cache.pools)


@pytest.mark.parametrize("n_steps", range(0, 40, 3))
def test_pages_of_one_that_ends_are_spare_at_once(n_steps: int) -> None:
    """Queued, in its prompt or generating: nobody holds them, or only a text that is kept."""
    rng = random.Random(n_steps)
    simulation = Simulation(12, SchedulerConfig(2, n_batch=64, step_ms=60))
    simulation.add(random_ids(rng, 30), 500)
    one = simulation.add(random_ids(rng, 600), 200)
    for _ in range(n_steps):
        simulation.step()
    simulation.scheduler.end(one)
    for _ in range(2):
        simulation.step()
    simulation.check()
    assert one.sequence is None
    follow = simulation.add(random_ids(rng, 2500), 1)  # all pages but two
    simulation.step()
    assert follow.state == "running"


def test_a_long_prompt_holds_nobody_up() -> None:
    """Once the costs are known, no step that has a token to give takes much more than its
    milliseconds, however much of the prompt is read."""
    rng = random.Random(1)
    simulation = Simulation(64, SchedulerConfig(8, step_ms=60))
    talking = [simulation.add(random_ids(rng, 20), 900) for _ in range(4)]
    for _ in range(30):
        simulation.step()
    simulation.gaps.clear()
    long = simulation.add(random_ids(rng, 3800), 5)
    while long not in simulation.first:
        simulation.step()
    assert max(simulation.gaps[request] for request in talking) <= 1.3 * 0.060
    alone = true_cost(StepShape(0, 3800, 3800, pairs(3800, 0))) / 1000
    assert simulation.first[long] - long.arrived < 2.5 * alone


def test_prompts_have_a_share_beside_many() -> None:
    """Though those that generate take a step's time, and more."""
    rng = random.Random(16)
    simulation = Simulation(64, SchedulerConfig(32, step_ms=60))
    for _ in range(28):
        simulation.add(random_ids(rng, 8), 400)
    for _ in range(30):
        simulation.step()
    last = simulation.add(random_ids(rng, 300), 5)
    while last not in simulation.first:
        taken, parts = simulation.steps[-1]
        assert taken < 72 + 1.2 * LEAST_SHARE * 60
        assert last.state == "waiting" or parts[-1].n_tokens >= LEAST_TOKENS or last.n_missing < 8
        simulation.step()
    assert simulation.first[last] - last.arrived < 3


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Wherever in a step it comes; and in the step that gives its token the long one has what is
    left of its time."""
    rng = random.Random(2)
    simulation = Simulation(64, SchedulerConfig(8, n_batch=512))
    long = simulation.add(random_ids(rng, 4000), 2)
    for _ in range(3):
        simulation.step()
    (longest, _) = max(simulation.steps, key=lambda step: step[0])
    assert longest > 300
    short = simulation.add(random_ids(rng, 50), 2)
    simulation.step()
    taken, parts = simulation.steps[-1]
    assert [part.request for part in parts] == [short]
    assert taken < 150
    simulation.run()
    assert simulation.first[short] - short.arrived + longest / 1000 < 0.9
    assert simulation.first[short] < simulation.first[long]


@pytest.mark.parametrize("n_read", [0, 900, 3000])
def test_a_short_prompt_passes_a_long_one_however_long_that_takes(n_read: int) -> None:
    """It waits for the step that runs, and gets its token in the next."""
    rng = random.Random(13)
    simulation = Simulation(
        64, SchedulerConfig(8, n_batch=256), cost=lambda shape: 3 * true_cost(shape)
    )
    long = simulation.add(random_ids(rng, 4000), 2)
    for _ in range(3):
        simulation.step()
    while long.n_held < n_read:
        simulation.step()
    short = simulation.add(random_ids(rng, 50), 2)
    simulation.step()
    assert short in simulation.first
    assert long not in simulation.first


def test_nobody_starves() -> None:
    """A long prompt gets its turn though short ones keep coming, each of which could pass it."""
    rng = random.Random(3)
    simulation = Simulation(200, SchedulerConfig(4, n_batch=128, step_ms=60))
    long = simulation.add(random_ids(rng, 3000), 2)
    for _ in range(4000):
        if long in simulation.first:
            break
        if len(simulation.scheduler.waiting) < 4:
            simulation.add(random_ids(rng, 100), 5)
        simulation.step()
    assert simulation.first[long] - long.arrived < 60


def test_one_that_waits_for_pages_is_not_passed_for_ever() -> None:
    rng = random.Random(5)
    simulation = Simulation(12, SchedulerConfig(8, n_batch=256, step_ms=60))
    for _ in range(3):
        simulation.add(random_ids(rng, 600), 30)
    simulation.step()
    long = simulation.add(random_ids(rng, 2600), 2)
    for _ in range(6000):
        if long in simulation.first:
            break
        if len(simulation.scheduler.waiting) < 5:
            simulation.add(random_ids(rng, 300), 30)
        assert simulation.step()
    assert simulation.first[long] - long.arrived < 60


def test_prompts_that_begin_alike_are_evaluated_once() -> None:
    """All that come at the same time, too: the others wait for the first."""
    rng = random.Random(6)
    simulation = Simulation(64, SchedulerConfig(16))
    common = random_ids(rng, 1000)
    requests = [simulation.add(common + random_ids(rng, 20), 3) for _ in range(16)]
    simulation.run()
    n_prompt = sum(
        part.n_tokens for _, parts in simulation.steps for part in parts if part.n_tokens > 1
    )
    assert n_prompt <= 1000 + 16 * 20
    assert sorted(request.n_reused for request in requests) == [0] + [1000] * 15


def test_the_youngest_gives_way_and_goes_on() -> None:
    rng = random.Random(7)
    simulation = Simulation(8, SchedulerConfig(4))
    requests = [simulation.add(random_ids(rng, 300), 500) for _ in range(3)]
    wanted = [expected(request.text.ids, 500) for request in requests]
    simulation.run()
    assert [request.text.ids for request in requests] == wanted
    assert simulation.scheduler.n_preempted == requests[2].n_preempted + requests[1].n_preempted
    assert requests[0].n_preempted == 0
    assert requests[2].n_preempted >= 1
    assert simulation.first[requests[0]] <= simulation.first[requests[2]]


def test_who_gives_way_takes_nothing_back_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in the middle of their prompts, and pages for one, which no count of them tells."""
    rng, simulation = random.Random(7), Simulation(config=SchedulerConfig(2, 64, step_ms=60))
    requests = list[Request]()
    for n in (600, 300):  # the second is shorter, and served first
        requests.append(simulation.add(random_ids(rng, n), 3))
        simulation.step()
    assert all(0 < request.n_held < 200 for request in requests)
    rows, scheduler = simulation.rows, simulation.scheduler
    reserve = rows.reserve

    def reserved(request: Request, n_tokens: int) -> bool:
        return len(scheduler.running) < 2 and reserve(request, n_tokens)

    monkeypatch.setattr(rows, "reserve", reserved)
    simulation.run()
    assert [len(request.text.ids) for request in requests] == [603, 303]


def test_priority_comes_first() -> None:
    rng = random.Random(8)
    simulation = Simulation(64, SchedulerConfig(2, n_batch=64))
    ordinary = [simulation.add(random_ids(rng, 200), 5) for _ in range(6)]
    urgent = simulation.add(random_ids(rng, 2000), 5, priority=1)
    simulation.run()
    assert simulation.first[urgent] <= sorted(simulation.first[one] for one in ordinary)[1]


def test_a_deadline_ends_a_request() -> None:
    rng = random.Random(9)
    simulation = Simulation(64, SchedulerConfig(1))
    first = simulation.add(random_ids(rng, 20), 300)
    late = simulation.add(random_ids(rng, 20), 5, deadline=1.0)
    cut = simulation.add(random_ids(rng, 20), 5, deadline=1000.0)
    simulation.run()
    assert late not in simulation.first
    assert late.state == first.state == cut.state == "done"
    assert len(cut.text.ids) == 25


def test_equal_streams_get_equal_shares() -> None:
    """Jain's index of tokens after some seconds."""
    rng = random.Random(10)
    simulation = Simulation(64, SchedulerConfig(16))
    requests = [simulation.add(random_ids(rng, 10 + 20 * i), 10_000) for i in range(8)]
    while simulation.now < 10:
        simulation.step()
    shares = [len(request.text.ids) - request.n_prompt for request in requests]
    assert sum(shares) ** 2 / (8 * sum(share**2 for share in shares)) >= 0.95


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_are_learned(noise: float) -> None:
    """Within a few steps of all kinds, and again when the machine gets three times slower."""
    rng = random.Random(11)
    model, errors = CostModel(), dict[float, float]()
    for slow in (1.0, 3.0):
        for number in range(150):
            n_prompt = rng.choice([0, 0, 16, 64, 128])
            n_held = rng.randint(0, 4000)
            n_rows = n_held + rng.randint(0, 16_000)
            shape = StepShape(rng.randint(0, 8), n_prompt, n_rows, pairs(n_prompt, n_held))
            taken = slow * true_cost(shape) * (1 + noise * rng.uniform(-1, 1))
            if number > 100:
                error = abs(model.milliseconds(shape) - slow * true_cost(shape))
                errors[slow] = max(errors.get(slow, 0.0), error / (slow * true_cost(shape)))
            model.learn(shape, taken)
    assert max(errors.values()) < 0.05 + 3 * noise
    for n_held in (0, 3000):
        besides = StepShape(4, 0, n_held)
        n = model.prompt_tokens(300 - model.milliseconds(besides), n_held)
        shape = StepShape(4, n, n_held, pairs(n, n_held))
        assert abs(3 * true_cost(shape) - 300) < 300 * (0.05 + 3 * noise)
    assert model.prompt_tokens(-1, 0) == 0


def test_an_outlier_counts_little() -> None:
    model = CostModel()
    for _ in range(50):
        model.learn(CHEAP, 20.0)
    model.learn(CHEAP, 5000.0)
    for _ in range(3):
        model.learn(CHEAP, 20.0)
    assert model.milliseconds(CHEAP) < 40


def test_pieces_are_whole_but_the_last() -> None:
    rng = random.Random(12)
    simulation = Simulation(64, SchedulerConfig(4, step_ms=50))
    simulation.add(random_ids(rng, 10), 300)
    simulation.step()
    simulation.add(random_ids(rng, 777), 2)
    simulation.run()
    pieces = [part.n_tokens for _, parts in simulation.steps[1:] for part in parts]
    prompts = [n for n in pieces if n > 1]
    assert all(n % PIECE == 0 for n in prompts[:-1])
    assert min(prompts[:-1]) >= LEAST_TOKENS
    assert mean(prompts) < 100
