/*
 * The driver's ring: six samples a second, the last 72 kept. A sample credits
 * the whole use of an engine to one process, as the real one does, so
 * per-process figures are statistical; which process is a function of the
 * sample's number alone (a golden-ratio sequence, so that shares come out
 * within a few samples, not a few thousand).
 */
#include "lab.h"

enum { PERIOD_US = 1000000 / RING_HZ };

static const enum attr engine_attr[ENGINES] = {A_UTIL, A_MEMUTIL, A_ENC, A_DEC};

int64_t ring_last_us(int64_t t) { return t - t % PERIOD_US; }

static bool uses(const struct process *p, int gpu, int64_t t) { return p->gpu == gpu && process_alive(p, t); }

static int64_t asked(const struct scenario *s, int gpu, enum engine e, int64_t t)
{
	int64_t sum = 0;
	for (int i = 0; i < s->n_procs; i++)
		if (uses(&s->procs[i], gpu, t))
			sum += s->procs[i].util[e];
	return sum;
}

/* What the engine does at t, in per cent. Without util= on the card it is what
 * the processes ask for, at most 100. */
static int64_t engine_util(const struct scenario *s, int gpu, enum engine e, int64_t t, int64_t sum)
{
	int64_t u = number_at(s, gpu, engine_attr[e], t, sum);
	return u > 100 ? 100 : u < 0 ? 0 : u;
}

static void take_sample(const struct scenario *s, int gpu, int64_t t, unsigned engines, struct sample *out)
{
	uint32_t phase = (uint32_t)((uint64_t)(t / PERIOD_US) * 2654435769u); /* frac(n·φ) × 2³² */
	int64_t sums[ENGINES] = {0}, marks[ENGINES];
	out->at_us = t;
	for (int i = 0; i < s->n_procs; i++)
		if (uses(&s->procs[i], gpu, t))
			for (int e = 0; e < ENGINES; e++)
				sums[e] += s->procs[i].util[e];
	int open = 0;
	for (int e = 0; e < ENGINES; e++) {
		out->util[e] = 0;
		out->pid[e] = 0;
		marks[e] = -1;
		if (!(engines & 1u << e))
			continue;
		int64_t util = engine_util(s, gpu, (enum engine)e, t, sums[e]);
		/* Use beyond what the processes ask for is nobody's. */
		int64_t whole = sums[e] > util ? sums[e] : util;
		out->util[e] = util * 100;
		if (sums[e] > 0) {
			marks[e] = (int64_t)((uint64_t)phase * (uint64_t)whole * 1000 >> 32);
			open++;
		}
	}
	for (int i = 0; open && i < s->n_procs; i++) {
		const struct process *p = &s->procs[i];
		if (!uses(p, gpu, t))
			continue;
		for (int e = 0; e < ENGINES; e++) {
			if (marks[e] < 0 || p->util[e] <= 0)
				continue;
			marks[e] -= p->util[e] * 1000;
			if (marks[e] < 0) {
				out->pid[e] = process_pid(p);
				open--;
			}
		}
	}
}

static int read_engines(const struct scenario *s, int gpu, int64_t after_us, int64_t t, unsigned engines, struct sample out[RING_SAMPLES])
{
	int64_t last = ring_last_us(t);
	int n = 0;
	for (int i = RING_SAMPLES - 1; i >= 0; i--) {
		int64_t at = last - (int64_t)i * PERIOD_US;
		if (at > after_us && at >= s->epoch_us)
			take_sample(s, gpu, at, engines, &out[n++]);
	}
	return n;
}

int ring_read(const struct scenario *s, int gpu, int64_t after_us, int64_t t, struct sample out[RING_SAMPLES])
{
	return read_engines(s, gpu, after_us, t, ~0u, out);
}

struct value device_util(const struct scenario *s, int gpu, enum engine e, int64_t t)
{
	struct value v = value_at(s, gpu, engine_attr[e], t);
	if (v.state == NOT_AVAILABLE)
		return v;
	struct sample ring[RING_SAMPLES];
	int n = read_engines(s, gpu, ring_last_us(t) - 1000000, t, 1u << e, ring);
	int64_t sum = 0;
	for (int i = 0; i < n; i++)
		sum += ring[i].util[e];
	v.state = SET;
	v.n = n ? sum / n / 100 : engine_util(s, gpu, e, t, asked(s, gpu, e, t));
	return v;
}

/* Mean use at one instant: the expectation of take_sample. */
static int64_t share_at(const struct scenario *s, int gpu, unsigned pid, enum engine e, int64_t t)
{
	int64_t sum = asked(s, gpu, e, t), util = engine_util(s, gpu, e, t, sum), own = 0;
	for (int i = 0; i < s->n_procs; i++)
		if (uses(&s->procs[i], gpu, t) && process_pid(&s->procs[i]) == pid)
			own += s->procs[i].util[e];
	int64_t whole = sum > util ? sum : util;
	return whole ? util * 100 * own / whole : 0;
}

int64_t mean_util(const struct scenario *s, int gpu, unsigned pid, enum engine e, int64_t from, int64_t to)
{
	__int128 sum = 0;
	for (int64_t t = from; t < to;) {
		/* Nothing changes until the next instant that a line names. */
		int64_t until = to;
#define STOP(x) if ((x) > t && (x) < until) until = (x)
		for (int i = 0; i < s->n_changes; i++)
			STOP(s->changes[i].at_us);
		for (int i = 0; i < s->n_procs; i++) {
			STOP(s->procs[i].from_us);
			STOP(s->procs[i].to_us);
		}
		sum += (__int128)share_at(s, gpu, pid, e, t) * (until - t);
		t = until;
	}
	return to > from ? (int64_t)(sum / (to - from)) : 0;
}
