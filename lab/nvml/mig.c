/* A card cut into MIG instances. */
#include "lab.h"

#include <string.h>

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	BEGIN(device, CARD_ONLY);
	NEED(current && pending);
	if (value_at(c.s, c.gpu, A_MIG, c.now).state == NOT_AVAILABLE)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = *pending = mig_enabled(c.s, c.gpu, c.now);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, IDENTITY);
	NEED(out);
	*out = c.mig != NULL;
	return NVML_SUCCESS;
}

static int64_t slices(const struct call *c) { return number_at(c->s, c->gpu, A_SLICES, c->now, 7); }

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	/* 0 on cards that can't be cut; a fixed number on those that can. */
	*out = value_at(c.s, c.gpu, A_MIG, c.now).state == NOT_AVAILABLE ? 0 : (unsigned)slices(&c);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (!mig_enabled(c.s, c.gpu, c.now))
		return NVML_ERROR_NOT_SUPPORTED;
	for (int i = 0; i < c.s->n_migs; i++) {
		const struct instance *m = &c.s->migs[i];
		if (m->gpu != c.gpu || !instance_alive(m, c.now) || index--)
			continue;
		*out = instance_handle(m);
		return out->handle ? NVML_SUCCESS : NVML_ERROR_MEMORY;
	}
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out)
{
	BEGIN(device, MIG_ONLY);
	NEED(out);
	*out = card_handle(c.gpu);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, MIG_ONLY);
	NEED(out);
	*out = (unsigned)c.mig->gi;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, MIG_ONLY);
	NEED(out);
	*out = (unsigned)c.mig->ci;
	return NVML_SUCCESS;
}

static nvmlReturn_t attributes(const struct call *c, nvmlDeviceAttributes_t *out)
{
	NEED(out);
	*out = (nvmlDeviceAttributes_t){
		.multiprocessorCount = (unsigned)c->mig->sms, .sharedCopyEngineCount = 1, .sharedDecoderCount = 1,
		.gpuInstanceSliceCount = (unsigned)c->mig->gi_slices, .computeInstanceSliceCount = (unsigned)c->mig->slices,
		.memorySizeMB = c->mig->memory_total_bytes >> 20};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *out) { BEGIN(device, MIG_ONLY); return attributes(&c, out); }
EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out) { BEGIN(device, MIG_ONLY); return attributes(&c, out); }

/* GPU instances. A handle is the first MIG device handle of the instance. */

static const struct { unsigned slices, id; } profiles[] = {
	[NVML_GPU_INSTANCE_PROFILE_1_SLICE] = {1, 19}, [NVML_GPU_INSTANCE_PROFILE_2_SLICE] = {2, 14},
	[NVML_GPU_INSTANCE_PROFILE_3_SLICE] = {3, 9}, [NVML_GPU_INSTANCE_PROFILE_4_SLICE] = {4, 5},
	[NVML_GPU_INSTANCE_PROFILE_7_SLICE] = {7, 0},
};
enum { PROFILES = sizeof profiles / sizeof *profiles };

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned profile, nvmlGpuInstanceProfileInfo_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out && profile < NVML_GPU_INSTANCE_PROFILE_COUNT);
	if (profile >= PROFILES || !mig_enabled(c.s, c.gpu, c.now) || profiles[profile].slices > slices(&c) ||
	    (slices(&c) == 4 && profiles[profile].slices == 3))
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned n = profiles[profile].slices;
	uint64_t mib = (uint64_t)number_at(c.s, c.gpu, A_MEM_TOTAL, c.now, 81559);
	*out = (nvmlGpuInstanceProfileInfo_t){.id = profiles[profile].id, .sliceCount = n, .instanceCount = (unsigned)slices(&c) / n,
		.multiprocessorCount = 16 * n, .copyEngineCount = 1, .decoderCount = 1, .memorySizeMB = mib * n / (uint64_t)slices(&c)};
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (!mig_enabled(c.s, c.gpu, c.now))
		return NVML_ERROR_NOT_SUPPORTED;
	for (int i = 0; i < c.s->n_migs; i++) {
		const struct instance *m = &c.s->migs[i];
		if (m->gpu != c.gpu || (unsigned)m->gi != id || !instance_alive(m, c.now))
			continue;
		*out = (nvmlGpuInstance_t){(void *)instance_handle(m).handle};
		return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_FOUND;
}

static unsigned profile_id(int64_t gi_slices)
{
	for (int i = 0; i < PROFILES; i++)
		if (profiles[i].slices == gi_slices)
			return profiles[i].id;
	return 0;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *out)
{
	BEGIN((nvmlDevice_t){(void *)instance.handle}, MIG_ONLY);
	NEED(out);
	memset(out, 0, sizeof *out);
	out->device = card_handle(c.gpu);
	out->id = (unsigned)c.mig->gi;
	out->profileId = profile_id(c.mig->gi_slices);
	out->placement.size = (unsigned)c.mig->gi_slices;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out, unsigned *count)
{
	BEGIN(device, CARD_ONLY);
	NEED(out && count);
	if (!mig_enabled(c.s, c.gpu, c.now))
		return NVML_ERROR_NOT_SUPPORTED;
	*count = 0;
	for (int i = 0; i < c.s->n_migs; i++) {
		const struct instance *m = &c.s->migs[i];
		bool again = false;
		for (int j = 0; j < i; j++)
			again |= c.s->migs[j].gpu == m->gpu && c.s->migs[j].gi == m->gi && instance_alive(&c.s->migs[j], c.now);
		if (m->gpu == c.gpu && !again && instance_alive(m, c.now) && profile_id(m->gi_slices) == id)
			out[(*count)++] = (nvmlGpuInstance_t){(void *)instance_handle(m).handle};
	}
	return NVML_SUCCESS;
}
