/* What every exported function does first: handles, faults, delays, hangs. */
#define _GNU_SOURCE
#include "lab.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;

static struct nvmlDevice_st cards[MAX_GPUS];

/* Handles of MIG devices are made on first use and never freed: a client may
 * keep one for ever. */
enum { MAX_INSTANCE_HANDLES = 4096 };
static struct nvmlDevice_st instances[MAX_INSTANCE_HANDLES];
static int n_instances;

/* Calls already failed by a `fault … COUNT` line. The count is this
 * process's: it is the one thing that two clients don't share. */
static struct { uint64_t id; int64_t used; } counts[256];
static int n_counts;

nvmlDevice_t card_handle(int gpu) { return (nvmlDevice_t){&cards[gpu]}; }

nvmlDevice_t instance_handle(const struct instance *m)
{
	struct nvmlDevice_st *found = NULL;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < n_instances && !found; i++) {
		struct nvmlDevice_st *h = &instances[i];
		if (h->gpu == m->gpu && h->gi == m->gi && h->ci == m->ci && !strcmp(h->uuid, m->uuid))
			found = h;
	}
	if (!found && n_instances < MAX_INSTANCE_HANDLES) {
		found = &instances[n_instances++];
		*found = (struct nvmlDevice_st){m->gpu, m->gi, m->ci, strdup(m->uuid)};
	}
	pthread_mutex_unlock(&lock);
	return (nvmlDevice_t){found};
}

static bool same_function(const char *rule, const char *function)
{
	size_t n = strlen(rule);
	if (!strcmp(rule, "*"))
		return strncmp(function, "nvmlInit", 8) && strncmp(function, "nvmlShutdown", 12);
	return !strncmp(rule, function, n) && (!function[n] || (function[n] == '_' && function[n + 1] == 'v'));
}

static bool applies(const struct rule *r, const char *function, int gpu)
{
	return (r->gpu < 0 || r->gpu == gpu) && same_function(r->function, function);
}

/* Whether a counted fault still has calls left, taking one. */
static bool take(const struct rule *r)
{
	if (r->count < 0)
		return true;
	pthread_mutex_lock(&lock);
	int i = 0;
	while (i < n_counts && counts[i].id != r->id)
		i++;
	if (i == n_counts && n_counts < (int)(sizeof counts / sizeof *counts))
		counts[n_counts++].id = r->id;
	bool left = i < n_counts && counts[i].used < r->count;
	if (left)
		counts[i].used++;
	pthread_mutex_unlock(&lock);
	return left;
}

enum { HANG_LOOK_US = 20000 };

/* Delays, hangs, then fails as the rules say. May replace the scenario. */
static nvmlReturn_t obey(struct scenario **s, const char *function, int gpu)
{
	for (int i = 0; i < (*s)->n_rules; i++)
		if ((*s)->rules[i].kind == RULE_DELAY && applies(&(*s)->rules[i], function, gpu))
			sleep_us((*s)->rules[i].delay_us);
	for (;;) {
		bool hangs = false;
		for (int i = 0; i < (*s)->n_rules && !hangs; i++)
			hangs = (*s)->rules[i].kind == RULE_HANG && applies(&(*s)->rules[i], function, gpu);
		if (!hangs)
			break;
		world_put(*s);
		sleep_us(HANG_LOOK_US);
		if (!(*s = world_get()))
			return NVML_ERROR_UNKNOWN;
	}
	for (int i = 0; i < (*s)->n_rules; i++) {
		const struct rule *r = &(*s)->rules[i];
		if (r->kind == RULE_FAULT && applies(r, function, gpu) && take(r))
			return (nvmlReturn_t)r->result;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t card_state(const struct scenario *s, int gpu, int64_t t)
{
	if (number_at(s, gpu, A_LOST, t, 0))
		return NVML_ERROR_GPU_IS_LOST;
	return (nvmlReturn_t)number_at(s, gpu, A_FAIL, t, NVML_SUCCESS);
}

static bool ready(void)
{
	pthread_mutex_lock(&lock);
	bool yes = initialised > 0;
	pthread_mutex_unlock(&lock);
	return yes;
}

static struct call begin(const char *function, int gpu)
{
	struct call c = {.gpu = gpu};
	if (!ready()) {
		c.ret = NVML_ERROR_UNINITIALIZED;
		return c;
	}
	if (!(c.s = world_get())) {
		c.ret = NVML_ERROR_UNKNOWN;
		return c;
	}
	c.ret = obey(&c.s, function, gpu);
	c.now = now_us();
	return c;
}

struct call call_system(const char *function) { return begin(function, -1); }

void call_end(struct call *c) { world_put(c->s); }

struct call call_device(const char *function, nvmlDevice_t handle, enum scope scope)
{
	const struct nvmlDevice_st *device = handle.handle;
	bool card = device >= cards && device < cards + MAX_GPUS;
	bool instance = device >= instances && device < instances + MAX_INSTANCE_HANDLES && device->uuid;
	if (!ready() || (!card && !instance)) {
		struct call c = {.ret = ready() ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED};
		return c;
	}
	struct call c = begin(function, card ? (int)(device - cards) : device->gpu);
	if (c.ret != NVML_SUCCESS)
		return c;
	if (c.gpu >= c.s->gpus) {
		c.ret = NVML_ERROR_INVALID_ARGUMENT;
		return c;
	}
	nvmlReturn_t state = card_state(c.s, c.gpu, c.now);
	/* A card that wants a reset still says who it is; a lost one doesn't. */
	if (state != NVML_SUCCESS && (scope != IDENTITY || state != NVML_ERROR_RESET_REQUIRED)) {
		c.ret = state;
		return c;
	}
	if (instance) {
		for (int i = 0; i < c.s->n_migs && !c.mig; i++) {
			const struct instance *m = &c.s->migs[i];
			if (m->gpu == device->gpu && m->gi == device->gi && m->ci == device->ci &&
			    !strcmp(m->uuid, device->uuid) && instance_alive(m, c.now) && mig_enabled(c.s, m->gpu, c.now))
				c.mig = m;
		}
		if (!c.mig) /* the card was cut anew since */
			c.ret = NVML_ERROR_INVALID_ARGUMENT;
		else if (scope == CARD_ONLY)
			c.ret = NVML_ERROR_NOT_SUPPORTED;
	} else if (scope == MIG_ONLY)
		c.ret = NVML_ERROR_INVALID_ARGUMENT;
	return c;
}

nvmlReturn_t give_long(const struct call *c, enum attr a, int64_t otherwise, unsigned long long *out)
{
	NEED(out);
	struct value v = value_at(c->s, c->gpu, a, c->now);
	if (v.state == NOT_AVAILABLE || (v.state == UNSET && otherwise == NONE))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned long long)(v.state == SET ? v.n : otherwise);
	return NVML_SUCCESS;
}

nvmlReturn_t give(const struct call *c, enum attr a, int64_t otherwise, unsigned *out)
{
	unsigned long long n;
	NEED(out);
	nvmlReturn_t ret = give_long(c, a, otherwise, &n);
	if (ret == NVML_SUCCESS)
		*out = (unsigned)n;
	return ret;
}

nvmlReturn_t give_text(const char *text, char *out, unsigned length)
{
	NEED(out);
	if (!text)
		return NVML_ERROR_NOT_SUPPORTED;
	if (strlen(text) >= length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(out, text);
	return NVML_SUCCESS;
}

/* Init is counted: as many Shutdowns undo it. */
static nvmlReturn_t init(const char *function)
{
	struct scenario *s = world_get();
	if (!s)
		return NVML_ERROR_UNKNOWN;
	nvmlReturn_t ret = obey(&s, function, -1);
	if (ret == NVML_SUCCESS)
		ret = (nvmlReturn_t)s->init_ret;
	world_put(s);
	if (ret == NVML_SUCCESS) {
		pthread_mutex_lock(&lock);
		initialised++;
		pthread_mutex_unlock(&lock);
	}
	return ret;
}

EXPORT nvmlReturn_t nvmlInit(void) { return init(__func__); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return init(__func__); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return init(__func__); }

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	pthread_mutex_lock(&lock);
	nvmlReturn_t ret = initialised ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
	if (initialised)
		initialised--;
	pthread_mutex_unlock(&lock);
	return ret;
}
