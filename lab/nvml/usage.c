/* Memory, utilisation and the processes that cause them. */
#include "lab.h"

#include <stddef.h>
#include <string.h>

struct memory { uint64_t total, reserved, used, free; };

static nvmlReturn_t memory(const struct call *c, struct memory *out)
{
	if (c->mig) {
		out->total = c->mig->memory_total_bytes;
		out->reserved = 0;
		out->used = (uint64_t)c->mig->memory_used_bytes.n;
		for (int i = 0; c->mig->memory_used_bytes.state == UNSET && i < c->s->n_procs; i++) {
			const struct process *p = &c->s->procs[i];
			if (p->gpu == c->gpu && p->gi == c->mig->gi && p->ci == c->mig->ci && !p->memory_na && process_alive(p, c->now))
				out->used += p->memory_bytes;
		}
	} else {
		if (value_at(c->s, c->gpu, A_MEM_USED, c->now).state == NOT_AVAILABLE)
			return NVML_ERROR_NOT_SUPPORTED;
		out->total = (uint64_t)number_at(c->s, c->gpu, A_MEM_TOTAL, c->now, 81559) << 20;
		out->reserved = (uint64_t)number_at(c->s, c->gpu, A_MEM_RESERVED, c->now, 512) << 20;
		out->used = memory_used(c->s, c->gpu, c->now);
	}
	uint64_t taken = out->used + out->reserved;
	out->free = taken < out->total ? out->total - taken : 0;
	return NVML_SUCCESS;
}

/* The first version counts the driver's reserve as used. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
	BEGIN(device, ANY_DEVICE);
	NEED(out);
	struct memory m;
	nvmlReturn_t ret = memory(&c, &m);
	if (ret == NVML_SUCCESS)
		*out = (nvmlMemory_t){.total = m.total, .free = m.free, .used = m.used + m.reserved};
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
	BEGIN(device, ANY_DEVICE);
	NEED(out);
	if (out->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	struct memory m;
	nvmlReturn_t ret = memory(&c, &m);
	if (ret == NVML_SUCCESS)
		*out = (nvmlMemory_v2_t){.version = nvmlMemory_v2, .total = m.total, .reserved = m.reserved, .free = m.free, .used = m.used};
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *out)
{
	BEGIN(device, ANY_DEVICE);
	NEED(out);
	*out = (nvmlBAR1Memory_t){.bar1Total = 128ull << 30, .bar1Used = 1 << 20, .bar1Free = (128ull << 30) - (1 << 20)};
	return NVML_SUCCESS;
}

/* Utilisation: none of it while the card is cut into instances. */

static bool cut(const struct call *c) { return mig_enabled(c->s, c->gpu, c->now); }

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (cut(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	struct value sm = device_util(c.s, c.gpu, ENGINE_SM, c.now), mem = device_util(c.s, c.gpu, ENGINE_MEMORY, c.now);
	if (sm.state != SET)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (nvmlUtilization_t){.gpu = (unsigned)sm.n, .memory = (unsigned)mem.n};
	return NVML_SUCCESS;
}

static nvmlReturn_t engine(const struct call *c, enum engine e, unsigned *out, unsigned *period_us)
{
	NEED(out && period_us);
	struct value v = device_util(c->s, c->gpu, e, c->now);
	if (cut(c) || v.state != SET)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned)v.n;
	*period_us = 1000000 / RING_HZ;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *out, unsigned *us) { BEGIN(device, CARD_ONLY); return engine(&c, ENGINE_ENCODER, out, us); }
EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *out, unsigned *us) { BEGIN(device, CARD_ONLY); return engine(&c, ENGINE_DECODER, out, us); }

static bool sampled(nvmlSamplingType_t type, enum engine *e, enum attr *a)
{
	static const enum engine engines[] = {
		[NVML_GPU_UTILIZATION_SAMPLES] = ENGINE_SM, [NVML_MEMORY_UTILIZATION_SAMPLES] = ENGINE_MEMORY,
		[NVML_ENC_UTILIZATION_SAMPLES] = ENGINE_ENCODER, [NVML_DEC_UTILIZATION_SAMPLES] = ENGINE_DECODER,
	};
	*a = ATTRS;
	switch (type) {
	case NVML_TOTAL_POWER_SAMPLES: *a = A_POWER; return true;
	case NVML_PROCESSOR_CLK_SAMPLES: *a = A_SM_MHZ; return true;
	case NVML_MEMORY_CLK_SAMPLES: *a = A_MEM_MHZ; return true;
	case NVML_GPU_UTILIZATION_SAMPLES:
	case NVML_MEMORY_UTILIZATION_SAMPLES:
	case NVML_ENC_UTILIZATION_SAMPLES:
	case NVML_DEC_UTILIZATION_SAMPLES: *e = engines[type]; return true;
	default: return false;
	}
}

EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last_seen,
					 nvmlValueType_t *value_type, unsigned *count, nvmlSample_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(count && value_type);
	enum engine e = ENGINE_SM;
	enum attr a;
	struct sample ring[RING_SAMPLES];
	if (cut(&c) || !sampled(type, &e, &a))
		return NVML_ERROR_NOT_SUPPORTED;
	*value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
	if (!out) {
		*count = c.s->ring;
		return NVML_SUCCESS;
	}
	int n = ring_read(c.s, c.gpu, (int64_t)last_seen, c.now, ring);
	bool active = a != ATTRS;
	for (int i = 0; i < n; i++)
		active |= ring[i].util[e] > 0;
	if (!n || !active) /* an idle engine has no samples */
		return NVML_ERROR_NOT_FOUND;
	if (*count < (unsigned)n) {
		*count = (unsigned)n;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = (unsigned)n;
	for (int i = 0; i < n; i++) {
		int64_t v = a == ATTRS ? ring[i].util[e] / 100 : number_at(c.s, c.gpu, a, ring[i].at_us, a == A_POWER ? 70000 : 1980);
		out[i] = (nvmlSample_t){.timeStamp = (unsigned long long)ring[i].at_us, .sampleValue.ullVal = (unsigned long long)v};
	}
	return NVML_SUCCESS;
}

/* One record for each PID that an engine was credited to, in per cent times
 * 100 summed over the samples. */
struct credit { unsigned pid; int64_t at_us, sum[ENGINES]; };

static int credit(const struct sample *ring, int n, struct credit out[RING_SAMPLES * ENGINES])
{
	int found = 0;
	for (int i = 0; i < n; i++)
		for (int e = 0; e < ENGINES; e++) {
			if (!ring[i].pid[e] || !ring[i].util[e])
				continue;
			int k = 0;
			while (k < found && out[k].pid != ring[i].pid[e])
				k++;
			if (k == found)
				out[found++] = (struct credit){.pid = ring[i].pid[e]};
			out[k].at_us = ring[i].at_us;
			out[k].sum[e] += ring[i].util[e];
		}
	return found;
}

/* Rows as drivers with dead clients in their ring were seen to give. */
static nvmlProcessUtilizationSample_t garbage(int i)
{
	return (nvmlProcessUtilizationSample_t){
		.pid = i % 2 ? 0 : 4000000000u + (unsigned)i, .timeStamp = i % 3 ? 0 : 1ull << 60, .smUtil = 37100, .memUtil = 4294967295u};
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned *count,
						    unsigned long long last_seen)
{
	BEGIN(device, CARD_ONLY);
	NEED(count);
	if (cut(&c) || value_at(c.s, c.gpu, A_UTIL, c.now).state == NOT_AVAILABLE)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!out) {
		*count = quirk_of(c.s, c.gpu, QUIRK_SAMPLES_PROBE_ZERO) ? 0 : c.s->ring;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	if (quirk_of(c.s, c.gpu, QUIRK_SAMPLES_GROW)) { /* the set grew since the probe */
		*count += *count / 2 + 1;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	struct sample ring[RING_SAMPLES];
	struct credit credits[RING_SAMPLES * ENGINES];
	const struct quirk *q = quirk_of(c.s, c.gpu, QUIRK_SAMPLES_GARBAGE);
	int n = ring_read(c.s, c.gpu, last_seen > INT64_MAX ? INT64_MAX : (int64_t)last_seen, c.now, ring);
	int found = credit(ring, n, credits), extra = q ? (int)q->n : 0;
	if (!found && !extra)
		return NVML_ERROR_NOT_FOUND;
	if (*count < (unsigned)(found + extra)) {
		*count = (unsigned)(found + extra);
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = (unsigned)(found + extra);
	for (int i = 0; i < found; i++) {
		/* Over all samples of the window, not only the process's own. */
		const int64_t *sum = credits[i].sum;
		out[i] = (nvmlProcessUtilizationSample_t){
			.pid = credits[i].pid, .timeStamp = (unsigned long long)credits[i].at_us,
			.smUtil = (unsigned)(sum[ENGINE_SM] / n / 100), .memUtil = (unsigned)(sum[ENGINE_MEMORY] / n / 100),
			.encUtil = (unsigned)(sum[ENGINE_ENCODER] / n / 100), .decUtil = (unsigned)(sum[ENGINE_DECODER] / n / 100)};
	}
	for (int i = 0; i < extra; i++)
		out[found + i] = garbage(i);
	return NVML_SUCCESS;
}

/* Process lists. */

/* What 535.43 … 535.86 wrote where _v3 was asked for. */
struct process_info_535 { nvmlProcessInfo_t info; unsigned long long protected_bytes; };

static nvmlReturn_t list(const struct call *c, char type, size_t size, unsigned *count, void *out)
{
	NEED(count && (out || !*count));
	bool mig = cut(c);
	if (mig && !c->mig && quirk_of(c->s, c->gpu, QUIRK_NO_MIG_PERMISSION))
		return NVML_ERROR_NO_PERMISSION;
	if (quirk_of(c->s, c->gpu, QUIRK_LIST_ZERO)) {
		*count = 0;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	if (quirk_of(c->s, c->gpu, QUIRK_LIST_ENDLESS)) {
		*count += 1;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	unsigned n = 0, room = *count;
	for (int i = 0; i < c->s->n_procs; i++) {
		const struct process *p = &c->s->procs[i];
		/* An MPS client has a channel of its own: it is on the compute list too. */
		bool listed = p->type == type || (type == 'C' && p->type == 'M');
		if (p->gpu != c->gpu || !listed || !process_alive(p, c->now) ||
		    (c->mig && (p->gi != c->mig->gi || p->ci != c->mig->ci)))
			continue;
		if (n < room) {
			struct process_info_535 row = {.info = {
				.pid = process_pid(p),
				.usedGpuMemory = p->memory_na ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : p->memory_bytes,
				.gpuInstanceId = mig && p->gi >= 0 ? (unsigned)p->gi : 0xFFFFFFFF,
				.computeInstanceId = mig && p->ci >= 0 ? (unsigned)p->ci : 0xFFFFFFFF}};
			/* The older layouts are beginnings of the newer ones. */
			memcpy((char *)out + n * size, &row, size);
		}
		n++;
	}
	*count = n;
	return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define LISTS(name, type)                                                                                   \
	EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *out)          \
	{                                                                                                   \
		BEGIN(device, ANY_DEVICE);                                                                  \
		return list(&c, type, sizeof *out, count, out);                                             \
	}                                                                                                   \
	EXPORT nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *out)      \
	{                                                                                                   \
		BEGIN(device, ANY_DEVICE);                                                                  \
		return list(&c, type, sizeof *out, count, out);                                             \
	}                                                                                                   \
	EXPORT nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out)         \
	{                                                                                                   \
		BEGIN(device, ANY_DEVICE);                                                                  \
		return list(&c, type, profile_process_info_v3_size, count, out);                            \
	}

LISTS(nvmlDeviceGetComputeRunningProcesses, 'C')
LISTS(nvmlDeviceGetGraphicsRunningProcesses, 'G')
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 'M')

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list_)
{
	BEGIN(device, ANY_DEVICE);
	NEED(list_);
	if (list_->version != nvmlProcessDetailList_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	nvmlProcessInfo_t rows[1024];
	unsigned n = sizeof rows / sizeof *rows, room = list_->numProcArrayEntries;
	NEED(list_->mode < NVML_PROCESS_MODE_MAX);
	nvmlReturn_t ret = list(&c, "CGM"[list_->mode % 3], sizeof *rows, &n, rows);
	if (ret != NVML_SUCCESS)
		return ret;
	list_->numProcArrayEntries = n;
	if (n > room || !list_->procArray)
		return n ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	for (unsigned i = 0; i < n; i++)
		list_->procArray[i] = (nvmlProcessDetail_v1_t){.pid = rows[i].pid, .usedGpuMemory = rows[i].usedGpuMemory,
			.gpuInstanceId = rows[i].gpuInstanceId, .computeInstanceId = rows[i].computeInstanceId};
	return NVML_SUCCESS;
}
