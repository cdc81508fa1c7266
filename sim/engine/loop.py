"""Steps of the fast path while nobody looks: the loop of `FastEngine`, in one function.

A request costs some fifteen microseconds in here, and a call a twentieth of one. So
this function is long, keeps in local variables what it asks for in every step, and
writes into the books of the recorder itself. It takes no decision of its own: batches
are formed by the scheduler, and whatever is not the plain case is left to `FastEngine`,
which goes on from exactly where this stops.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from sim.engine.outputs import NEVER
from sim.engine.sampling import finish, last_num_tokens
from sim.engine.stepwise import no_length
from sim.results.rows import CHUNK_ROWS, pack_facts, pack_head

if TYPE_CHECKING:
    from sim.costs.base import DecodeEnds
    from sim.engine.fast import FastEngine
    from sim.scheduler.request import Request

MAX_NUM_QUIET_STEPS = 4096
"""Most steps taken at once: how long an interruption may have to wait."""


def run_unseen(engine: FastEngine) -> float | None:  # noqa: PLR0912, PLR0915
    """Take steps until something comes up that is not for this loop.

    That is: an event of the clock, an observer at the end of the next step, a request
    that may have to be rejected or that somebody waits for, nothing to do, or the wish
    to stop.

    Returns
    -------
    float or None
        End of the step in progress in seconds, or None between two steps.
    """
    env, scheduler, recorder = engine.env, engine.scheduler, engine.recorder
    arrivals, calendar = engine.arrivals, engine.calendar
    running, waiting, clock = scheduler.running, scheduler.waiting, scheduler.clock
    tables, block_size = scheduler.tables, scheduler.block_size
    buckets, num_usable = clock.buckets, tables.num_usable_blocks
    due, due_steps, free = calendar.due, calendar.steps, tables.free
    form, quiet_steps, advance = (
        scheduler.form,
        scheduler.quiet_steps,
        scheduler.advance,
    )
    batch_total, decode_ends = engine.batch_total, engine.decode_ends
    usage_facts = scheduler.usage_facts
    most_tokens = scheduler.most_unquestioned_tokens
    active, rows, add_rows = recorder.active, recorder.rows, recorder.requests.add
    packed, heads, finished_rows = rows.packed, rows.heads, rows.finished_rows
    ends_s, new_blocks = rows.ends_s, rows.new_blocks

    known_ends: dict[int, DecodeEnds] = {}
    now_s: float = env.now
    event_s: float = env.peek()
    next_s = arrivals.next_s
    next_due = calendar.next_step
    step = engine.num_steps
    seen_step = engine.next_seen_step()
    occupancy_s, occupied_since_s = recorder.occupancy_s, recorder.occupied_since_s
    num_arrived = num_finished = 0
    try:
        while step < seen_step and (running or waiting) and not engine.stop_requested:
            # -- what begins now: a stretch of quiet steps, or a step in full
            most = next_due - step + 1
            left = seen_step - step
            most = left if left < most else most
            num_steps = quiet_steps(
                most if most < MAX_NUM_QUIET_STEPS else MAX_NUM_QUIET_STEPS
            )
            if num_steps:
                if len(ends_s) >= CHUNK_ROWS:
                    rows.flush()
                num_decodes = clock.num_decodes
                context = clock.num_base_tokens + num_decodes * step
                ends_of = known_ends.get(num_decodes)
                if ends_of is None:
                    ends_of = known_ends[num_decodes] = decode_ends(num_decodes)
                ends = ends_of(
                    context, num_steps, now_s, next_s if next_s < event_s else event_s
                )
                num_steps = len(ends)
                end_s = ends[-1]
                if not (ends[-2] if num_steps > 1 else now_s) < end_s < inf:
                    engine.refuse_length(context, [now_s, *ends])
                heads.append(
                    pack_head(
                        step,
                        num_decodes,
                        len(waiting),
                        context,
                        num_usable - tables.num_free_blocks,
                        tables.num_logical_blocks,
                        num_usable,
                        block_size,
                        num_steps,
                        len(packed),
                        now_s,
                    )
                )
                ends_s.extend(ends)
                new_blocks.extend(advance(num_steps))
                step += num_steps - 1
            else:
                shape = form(now_s)
                total_s = batch_total(*shape)
                end_s = now_s + total_s
                if not now_s < end_s < inf:
                    raise no_length(total_s, now_s)
                if scheduler.preemptions:
                    recorder.decided(step, now_s, shape, scheduler)
                    engine.leave_calendar(step)
                else:
                    if len(packed) >= CHUNK_ROWS:
                        rows.flush()
                    packed.append(
                        pack_facts(
                            step,
                            now_s,
                            len(running),
                            len(waiting),
                            0,
                            *shape,
                            0,
                            0,
                            0,
                            *usage_facts(),
                            0,
                            scheduler.num_recomputed_tokens,
                        )
                    )
                if not (shape[0] or shape[2]):
                    engine.note_empty_step(shape)
                    return end_s

            engine.num_empty_steps = 0

            # -- what happens until it ends
            if end_s >= event_s:
                return end_s
            while next_s <= end_s:
                request = arrivals.upcoming
                if (
                    request is None
                    or request.num_prompt_tokens >= most_tokens
                    or request.max_num_tokens > most_tokens
                ):
                    return end_s
                arrivals.pop()
                occupancy_s += len(active) * (next_s - occupied_since_s)
                occupied_since_s = next_s
                num_arrived += 1
                active[request.request_id] = request
                waiting.append(request)
                next_s = arrivals.next_s
                if next_s == inf:
                    engine.close_arrivals()

            # -- last tokens
            finished: list[Request] = []
            completing = scheduler.completing
            if step == next_due:
                finished += due[step]
            for request in chain(finished, completing):
                if request.on_end is not None:
                    return end_s
            if step == next_due:
                del due[heappop(due_steps)]
                next_due = due_steps[0] if due_steps else NEVER
                clock.num_decodes -= len(finished)
                for request in finished:
                    base_tokens = request.base_tokens
                    num_tokens = base_tokens + step
                    request.num_computed_tokens = num_tokens
                    request.num_tokens = num_tokens + 1
                    request.due_step = -1
                    request.streaks.append((request.joined_step, step))
                    clock.num_base_tokens -= base_tokens
                    del buckets[(1 - base_tokens) % block_size][request]

            # -- first tokens
            if completing:
                for request in completing:
                    num_tokens = request.num_tokens + 1
                    request.num_tokens = num_tokens
                    request.joined_step = step
                    if num_tokens == request.num_prompt_tokens + 1:
                        request.first_token_s = end_s
                    num_left = last_num_tokens(request) - num_tokens
                    if num_left > 0:
                        last_step = request.due_step = step + num_left
                        if last_step in due:
                            due[last_step][request] = None
                        else:
                            due[last_step] = {request: None}
                            heappush(due_steps, last_step)
                            next_due = last_step if last_step < next_due else next_due
                        # The next step is its first as a decode.
                        base_tokens = request.base_tokens = num_tokens - step - 1
                        clock.num_decodes += 1
                        clock.num_base_tokens += base_tokens
                        buckets[(1 - base_tokens) % block_size][request] = None
                    else:
                        request.streaks.append((step, step))
                        finished.append(request)
                scheduler.completing = []
                partial = scheduler.partial
                scheduler.num_chunk_tokens = (
                    0 if partial is None else partial.num_computed_tokens
                )

            # -- those that leave
            if finished:
                occupancy_s += len(active) * (end_s - occupied_since_s)
                occupied_since_s = end_s
                num_finished += len(finished)
                for request in finished:
                    finish(request, end_s)
                    free(request)
                    del running[request], active[request.request_id]
                if scheduler.head_is_blocked:
                    scheduler.look_again()
                finished_rows.append((len(packed) + len(ends_s) - 1, len(finished)))
                add_rows(finished)
            now_s = end_s
            step += 1
        return None
    finally:
        env._now = now_s
        engine.num_steps = step
        calendar.next_step = next_due
        recorder.occupancy_s, recorder.occupied_since_s = occupancy_s, occupied_since_s
        recorder.num_arrived += num_arrived
        recorder.num_finished += num_finished
