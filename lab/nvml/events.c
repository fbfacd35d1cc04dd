/* Event sets: a wait that blocks, and each XID once for each set. */
#include "lab.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { LOOK_US = 100000, MAX_DELIVERED = 4096 };

struct nvmlEventSet_st {
	unsigned magic;
	int64_t since_us[MAX_GPUS]; /* registered then; INT64_MAX: not */
	unsigned long long types[MAX_GPUS];
	struct xid delivered[MAX_DELIVERED];
	int n_delivered;
};

enum { MAGIC = 0x65767473 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
	BEGIN_SYSTEM();
	NEED(out);
	struct nvmlEventSet_st *set = calloc(1, sizeof *set);
	if (!set)
		return NVML_ERROR_MEMORY;
	set->magic = MAGIC;
	for (int i = 0; i < MAX_GPUS; i++)
		set->since_us[i] = INT64_MAX;
	out->handle = set;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t handle)
{
	struct nvmlEventSet_st *set = handle.handle;
	BEGIN_SYSTEM();
	NEED(set && set->magic == MAGIC);
	set->magic = 0;
	free(set);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	*out = nvmlEventTypeXidCriticalError | nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t handle)
{
	struct nvmlEventSet_st *set = handle.handle;
	BEGIN(device, CARD_ONLY);
	NEED(set && set->magic == MAGIC);
	pthread_mutex_lock(&lock);
	if (set->since_us[c.gpu] == INT64_MAX)
		set->since_us[c.gpu] = c.now;
	set->types[c.gpu] |= types;
	pthread_mutex_unlock(&lock);
	return NVML_SUCCESS;
}

static bool seen(const struct nvmlEventSet_st *set, const struct xid *x)
{
	for (int i = 0; i < set->n_delivered; i++) {
		const struct xid *d = &set->delivered[i];
		if (d->gpu == x->gpu && d->code == x->code && d->at_us == x->at_us && d->occurrence == x->occurrence)
			return true;
	}
	return false;
}

/* The oldest event that this set is still owed. */
static bool take(struct nvmlEventSet_st *set, const struct scenario *s, int64_t now, struct xid *out)
{
	bool found = false;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < s->n_xids && s->xids[i].at_us <= now && !found; i++) {
		const struct xid *x = &s->xids[i];
		found = x->at_us >= set->since_us[x->gpu] && set->types[x->gpu] & nvmlEventTypeXidCriticalError &&
			set->n_delivered < MAX_DELIVERED && !seen(set, x);
		if (found)
			*out = set->delivered[set->n_delivered++] = *x;
	}
	pthread_mutex_unlock(&lock);
	return found;
}

static nvmlReturn_t wait_event(struct nvmlEventSet_st *set, nvmlEventData_t *out, unsigned timeout_ms, bool v2)
{
	NEED(set && set->magic == MAGIC && out);
	int64_t deadline = now_us() + (int64_t)timeout_ms * 1000;
	for (;;) {
		struct scenario *s = world_get();
		struct xid x = {0};
		int64_t now = now_us();
		bool found = s && take(set, s, now, &x);
		world_put(s);
		if (found) {
			out->device = card_handle(x.gpu);
			out->eventType = nvmlEventTypeXidCriticalError;
			out->eventData = x.code;
			if (v2) { /* the first version's struct ends here */
				out->gpuInstanceId = (unsigned)x.gi;
				out->computeInstanceId = (unsigned)x.ci;
			}
			return NVML_SUCCESS;
		}
		if (now >= deadline)
			return NVML_ERROR_TIMEOUT;
		sleep_us(deadline - now < LOOK_US ? deadline - now : LOOK_US);
	}
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *out, unsigned ms) { BEGIN_SYSTEM(); return wait_event(set.handle, out, ms, false); }
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned ms) { BEGIN_SYSTEM(); return wait_event(set.handle, out, ms, true); }
