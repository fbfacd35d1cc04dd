/*
 * Accounting mode. Written out with `acct` lines, or kept by the card itself
 * (accounting=1): then each process that began while the world existed is
 * accounted, from the same activity as the sample ring.
 */
#include "lab.h"

#include <string.h>

/* The driver keeps this many of the dead; older ones are lost. */
enum { MAX_DEAD = 128, BUFFER_SIZE = 4000, MAX_ENTRIES = 4096 };

static bool mode(const struct call *c)
{
	struct value v = value_at(c->s, c->gpu, A_ACCOUNTING, c->now);
	if (v.state != UNSET)
		return v.state == SET && v.n;
	for (int i = 0; i < c->s->n_accounts; i++)
		if (c->s->accounts[i].gpu == c->gpu)
			return true;
	return false;
}

static bool unsupported(const struct call *c)
{
	return mig_enabled(c->s, c->gpu, c->now) || value_at(c->s, c->gpu, A_ACCOUNTING, c->now).state == NOT_AVAILABLE;
}

static struct account of_process(const struct call *c, const struct process *p)
{
	int64_t from = p->from_us > c->s->epoch_us ? p->from_us : c->s->epoch_us;
	int64_t to = p->to_us < c->now ? p->to_us : c->now;
	struct account a = {.gpu = c->gpu, .pid = process_pid(p), .max_memory_bytes = p->memory_na ? -1 : (int64_t)p->memory_bytes,
		.start_us = from, .running = p->to_us > c->now, .to_us = p->to_us};
	a.samples = (to - from) / 1000000;
	a.sum_util = mean_util(c->s, c->gpu, a.pid, ENGINE_SM, from, to) * a.samples;
	a.sum_memutil = mean_util(c->s, c->gpu, a.pid, ENGINE_MEMORY, from, to) * a.samples;
	a.util = a.samples ? a.sum_util / a.samples / 100 : 0;
	a.memutil = a.samples ? a.sum_memutil / a.samples / 100 : 0;
	a.time_ms = a.running ? 0 : (to - from) / 1000;
	return a;
}

/* All entries, the dead first: that is where the driver looks first, so a dead
 * process shadows a live one with the same number. */
static int entries(const struct call *c, struct account out[MAX_ENTRIES])
{
	int n = 0;
	for (int dead = 1; dead >= 0; dead--) {
		int begin = n;
		for (int i = 0; i < c->s->n_accounts && n < MAX_ENTRIES; i++) {
			const struct account *a = &c->s->accounts[i];
			if (a->gpu == c->gpu && a->running != dead && a->from_us <= c->now && c->now < a->to_us)
				out[n++] = *a;
		}
		bool automatic = number_at(c->s, c->gpu, A_ACCOUNTING, c->now, 0) != 0;
		for (int i = 0; automatic && i < c->s->n_procs && n < MAX_ENTRIES; i++) {
			const struct process *p = &c->s->procs[i];
			if (p->gpu != c->gpu || p->from_us > c->now || !process_pid(p) || (p->to_us > c->now) == dead)
				continue;
			out[n++] = of_process(c, p);
		}
		if (dead && n - begin > MAX_DEAD) {
			memmove(&out[begin], &out[n - MAX_DEAD], MAX_DEAD * sizeof *out);
			n = begin + MAX_DEAD;
		}
		/* Only the latest dead of one number is kept. */
		for (int i = begin; dead && i < n; i++)
			for (int j = i + 1; j < n; j++)
				if (out[i].pid == out[j].pid) {
					memmove(&out[i], &out[i + 1], (size_t)(n - i - 1) * sizeof *out);
					n--, i--;
					break;
				}
	}
	return n;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (unsupported(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = mode(&c) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (unsupported(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = BUFFER_SIZE; /* what the driver says, which is not what it keeps */
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids)
{
	BEGIN(device, CARD_ONLY);
	NEED(count);
	if (unsupported(&c) || !mode(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	struct account all[MAX_ENTRIES];
	int n = entries(&c, all);
	if (!pids || *count < (unsigned)n) {
		*count = (unsigned)n;
		return n ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	}
	*count = (unsigned)n;
	for (int i = 0; i < n; i++)
		pids[i] = all[i].pid;
	return NVML_SUCCESS;
}

static nvmlReturn_t find(const struct call *c, unsigned pid, struct account *out)
{
	if (unsupported(c) || !mode(c))
		return NVML_ERROR_NOT_SUPPORTED;
	struct account all[MAX_ENTRIES];
	int n = entries(c, all);
	for (int i = 0; i < n; i++)
		if (all[i].pid == pid) {
			*out = all[i];
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	struct account a;
	nvmlReturn_t ret = find(&c, pid, &a);
	if (ret == NVML_SUCCESS)
		*out = (nvmlAccountingStats_t){.gpuUtilization = (unsigned)a.util, .memoryUtilization = (unsigned)a.memutil,
			.maxMemoryUsage = (unsigned long long)a.max_memory_bytes, .time = a.running ? 0 : (unsigned long long)a.time_ms,
			.startTime = (unsigned long long)a.start_us, .isRunning = a.running};
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	struct account a;
	nvmlReturn_t ret = find(&c, out->pid, &a);
	if (ret == NVML_SUCCESS)
		*out = (nvmlAccountingStats_v2_t){.pid = out->pid, .isRunning = a.running, .gpuUtilization = (unsigned)a.util,
			.memoryUtilization = (unsigned)a.memutil, .maxMemoryUsage = (unsigned long long)a.max_memory_bytes,
			.time = a.running ? 0 : (unsigned long long)a.time_ms, .startTime = (unsigned long long)a.start_us,
			.sampleCount = (unsigned)a.samples, .sumGpuUtil = (unsigned long long)a.sum_util,
			.sumFbUtil = (unsigned long long)a.sum_memutil};
	return ret;
}
