/* Scenario text to struct scenario. The format is described in lab/README.md. */
#define _GNU_SOURCE
#include "words.h"

#include <inttypes.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>

static const char *const attr_names[ATTRS] = {
	[A_MEM_TOTAL] = "mem_total_mib", [A_MEM_USED] = "mem_used_mib", [A_MEM_RESERVED] = "mem_reserved_mib",
	[A_UTIL] = "util", [A_MEMUTIL] = "memutil", [A_ENC] = "enc", [A_DEC] = "dec",
	[A_TEMP] = "temp", [A_MEM_TEMP] = "mem_temp", [A_TEMP_SHUTDOWN] = "temp_shutdown",
	[A_TEMP_SLOWDOWN] = "temp_slowdown", [A_TEMP_MEM_MAX] = "temp_mem_max", [A_TEMP_GPU_MAX] = "temp_gpu_max",
	[A_POWER] = "power_mw", [A_POWER_LIMIT] = "power_limit_mw", [A_POWER_ENFORCED] = "power_enforced_mw",
	[A_POWER_DEFAULT] = "power_default_mw", [A_POWER_MIN] = "power_min_mw", [A_POWER_MAX] = "power_max_mw",
	[A_ENERGY] = "energy_mj",
	[A_GRAPHICS_MHZ] = "graphics_mhz", [A_SM_MHZ] = "sm_mhz", [A_MEM_MHZ] = "mem_mhz", [A_VIDEO_MHZ] = "video_mhz",
	[A_MAX_GRAPHICS_MHZ] = "max_graphics_mhz", [A_MAX_SM_MHZ] = "max_sm_mhz", [A_MAX_MEM_MHZ] = "max_mem_mhz",
	[A_MAX_VIDEO_MHZ] = "max_video_mhz",
	[A_FAN] = "fan", [A_FANS] = "fans", [A_THROTTLE] = "throttle",
	[A_PCIE_GEN] = "pcie_gen", [A_PCIE_GEN_MAX] = "pcie_gen_max", [A_PCIE_WIDTH] = "pcie_width",
	[A_PCIE_WIDTH_MAX] = "pcie_width_max", [A_PCIE_REPLAYS] = "pcie_replays", [A_PCIE_TX] = "pcie_tx_kbs",
	[A_PCIE_RX] = "pcie_rx_kbs",
	[A_ECC] = "ecc", [A_ECC_CORRECTED] = "ecc_corrected", [A_ECC_UNCORRECTED] = "ecc_uncorrected",
	[A_ECC_CORRECTED_AGG] = "ecc_corrected_aggregate", [A_ECC_UNCORRECTED_AGG] = "ecc_uncorrected_aggregate",
	[A_REMAPPED_CORRECTED] = "remapped_corrected", [A_REMAPPED_UNCORRECTED] = "remapped_uncorrected",
	[A_REMAP_PENDING] = "remap_pending", [A_REMAP_FAILURE] = "remap_failure",
	[A_RETIRED_SBE] = "retired_sbe", [A_RETIRED_DBE] = "retired_dbe", [A_RETIRED_PENDING] = "retired_pending",
	[A_NVLINKS] = "nvlinks", [A_NVLINK_CRC] = "nvlink_crc", [A_NVLINK_REPLAY] = "nvlink_replay",
	[A_NVLINK_RECOVERY] = "nvlink_recovery",
	[A_MIG] = "mig", [A_SLICES] = "slices", [A_PERSISTENCE] = "persistence", [A_PSTATE] = "pstate",
	[A_COMPUTE_MODE] = "compute_mode", [A_MINOR] = "minor", [A_ACCOUNTING] = "accounting",
	[A_RECOVERY] = "recovery_action", [A_ARCH] = "arch", [A_CUDA_MAJOR] = "cuda_major",
	[A_CUDA_MINOR] = "cuda_minor", [A_CORES] = "cores", [A_BUS_WIDTH] = "bus_width",
	[A_LOST] = "lost", [A_FAIL] = "fail",
};

static const char *const text_names[TEXTS] = {
	[T_UUID] = "uuid", [T_NAME] = "name", [T_SERIAL] = "serial", [T_VBIOS] = "vbios", [T_PCI] = "pci", [T_PART] = "part",
};

static const char *const quirk_names[QUIRKS] = {
	[QUIRK_SAMPLES_PROBE_ZERO] = "samples_probe_zero", [QUIRK_SAMPLES_GROW] = "samples_grow",
	[QUIRK_SAMPLES_GARBAGE] = "samples_garbage", [QUIRK_LIST_ZERO] = "list_zero",
	[QUIRK_LIST_ENDLESS] = "list_endless", [QUIRK_NO_MIG_PERMISSION] = "no_mig_permission",
};

static void *grow(void *array, int n, size_t size)
{
	if (n & (n - 1)) /* doubled at every power of two */
		return array;
	void *bigger = realloc(array, (n ? (size_t)n * 2 : 1) * size);
	if (!bigger)
		abort();
	return bigger;
}
#define PUSH(array, n) ((array) = grow((array), (n), sizeof *(array)), memset(&(array)[n], 0, sizeof *(array)), &(array)[(n)++])

static bool one_of(const char *name, const char *const *names, int n, int *index)
{
	for (*index = 0; *index < n; ++*index)
		if (!strcmp(name, names[*index]))
			return true;
	return false;
}

static struct value numeric(struct parser *p, const char *key, const char *text)
{
	struct value v = {NOT_AVAILABLE, 0};
	if (!strcmp(text, "na"))
		return v;
	if (integer(p, key, text, &v.n))
		v.state = SET;
	return v;
}

/* Attributes shared by `gpu` and `at … gpu`. */
static bool gpu_attr(struct parser *p, char *key, char *text, enum attr *a, struct value *v)
{
	int i;
	if (!strcmp(key, "energy_na") || !strcmp(key, "mem_na")) {
		*a = *key == 'e' ? A_ENERGY : A_MEM_USED;
		*v = (struct value){strcmp(text, "0") ? NOT_AVAILABLE : UNSET, 0};
		return true;
	}
	if (!one_of(key, attr_names, ATTRS, &i))
		return false;
	*a = (enum attr)i;
	*v = numeric(p, key, text);
	return true;
}

static void parse_gpu(struct parser *p)
{
	int n = need_gpu(p, false), i;
	struct gpu *g = &p->s->gpu[n];
	char *key, *text;
	if (g->present)
		fault(p, "gpu %d is there twice", n);
	g->present = true;
	while (pair(p, &key, &text)) {
		enum attr a;
		struct value v;
		if (one_of(key, text_names, TEXTS, &i)) {
			free(g->text[i]);
			g->text[i] = strdup(text);
		} else if (gpu_attr(p, key, text, &a, &v))
			g->attr[a] = v;
		else
			fault(p, "gpu has no key \"%s\"", key);
	}
}

static void parse_proc(struct parser *p)
{
	static const char *const engines[ENGINES] = {"sm", "memutil", "enc", "dec"};
	struct process *r = PUSH(p->s->procs, p->s->n_procs);
	*r = (struct process){.gpu = need_gpu(p, false), .type = 'C', .gi = -1, .ci = -1, .from_us = INT64_MIN, .to_us = INT64_MAX};
	char *key, *text;
	int64_t n;
	int i;
	bool named = false;
	while (pair(p, &key, &text)) {
		if (!strcmp(key, "pid")) {
			named = true;
			if (*text == '@')
				r->pid_file = text[1] == '/' ? strdup(text + 1) : NULL;
			if (*text == '@' && !r->pid_file && asprintf(&r->pid_file, "%s/%s", p->s->directory, text + 1) < 0)
				abort();
			if (*text != '@' && integer(p, key, text, &n))
				r->pid = (unsigned)n;
		} else if (!strcmp(key, "type")) {
			if (strlen(text) != 1 || !strchr("CGM", *text))
				fault(p, "type is C (compute), G (graphics) or M (MPS client), not \"%s\"", text);
			r->type = *text;
		} else if (!strcmp(key, "mem_mib")) {
			if (integer(p, key, text, &n))
				r->memory_bytes = (uint64_t)n << 20;
		} else if (!strcmp(key, "mem_bytes")) {
			if (integer(p, key, text, &n))
				r->memory_bytes = (uint64_t)n;
		} else if (!strcmp(key, "mem_na"))
			r->memory_na = strcmp(text, "0");
		else if (!strcmp(key, "from"))
			instant(p, text, &r->from_us);
		else if (!strcmp(key, "to"))
			instant(p, text, &r->to_us);
		else if (!strcmp(key, "gi") || !strcmp(key, "ci")) {
			if (integer(p, key, text, &n))
				*(*key == 'g' ? &r->gi : &r->ci) = (int)n;
		} else if (one_of(key, engines, ENGINES, &i))
			integer(p, key, text, &r->util[i]);
		else
			fault(p, "proc has no key \"%s\"", key);
	}
	if (!named)
		fault(p, "proc needs pid=N or pid=@FILE");
}

static void parse_mig(struct parser *p)
{
	struct instance *m = PUSH(p->s->migs, p->s->n_migs);
	*m = (struct instance){.gpu = need_gpu(p, false), .gi = -1, .slices = -1, .gi_slices = -1, .from_us = INT64_MIN, .to_us = INT64_MAX};
	char *key, *text;
	int64_t n, total_mib = -1;
	while (pair(p, &key, &text)) {
		if (!strcmp(key, "gi") || !strcmp(key, "ci")) {
			if (integer(p, key, text, &n))
				*(*key == 'g' ? &m->gi : &m->ci) = (int)n;
		} else if (!strcmp(key, "profile")) {
			free(m->profile);
			m->profile = strdup(text);
		} else if (!strcmp(key, "uuid")) {
			free(m->uuid);
			m->uuid = strdup(text);
		} else if (!strcmp(key, "slices"))
			integer(p, key, text, &m->slices);
		else if (!strcmp(key, "gi_slices"))
			integer(p, key, text, &m->gi_slices);
		else if (!strcmp(key, "sms"))
			integer(p, key, text, &m->sms);
		else if (!strcmp(key, "mem_total_mib"))
			integer(p, key, text, &total_mib);
		else if (!strcmp(key, "mem_used_mib")) {
			m->memory_used_bytes = numeric(p, key, text);
			m->memory_used_bytes.n <<= 20;
		} else if (!strcmp(key, "from"))
			instant(p, text, &m->from_us);
		else if (!strcmp(key, "to"))
			instant(p, text, &m->to_us);
		else
			fault(p, "mig has no key \"%s\"", key);
	}
	/* A profile says its own size: [1c.]2g.35gb[+me]. */
	long compute, slices, gib;
	bool split = m->profile && sscanf(m->profile, "%ldc.%ldg.%ldgb", &compute, &slices, &gib) == 3;
	if (!split && (!m->profile || sscanf(m->profile, "%ldg.%ldgb", &slices, &gib) != 2)) {
		fault(p, "mig needs profile=, such as 2g.35gb or 1c.3g.40gb");
		slices = gib = 1;
	}
	if (m->gi < 0)
		fault(p, "mig needs gi=N");
	if (m->gi_slices < 0)
		m->gi_slices = slices;
	if (m->slices < 0)
		m->slices = split ? compute : slices;
	m->memory_total_bytes = (uint64_t)(total_mib >= 0 ? total_mib : gib << 10) << 20;
	if (!m->sms)
		m->sms = 16 * m->slices;
}

static void parse_acct(struct parser *p)
{
	struct account *a = PUSH(p->s->accounts, p->s->n_accounts);
	*a = (struct account){.gpu = need_gpu(p, false), .start_us = p->s->epoch_us, .samples = -1, .from_us = INT64_MIN, .to_us = INT64_MAX};
	char *key, *text;
	int64_t n;
	while (pair(p, &key, &text)) {
		if (!strcmp(key, "from") || !strcmp(key, "to")) {
			instant(p, text, *key == 'f' ? &a->from_us : &a->to_us);
			continue;
		}
		if (!integer(p, key, text, &n))
			continue;
		if (!strcmp(key, "pid")) a->pid = (unsigned)n;
		else if (!strcmp(key, "util")) a->util = n;
		else if (!strcmp(key, "memutil")) a->memutil = n;
		else if (!strcmp(key, "maxmem_mib")) a->max_memory_bytes = n << 20;
		else if (!strcmp(key, "time_ms")) a->time_ms = n;
		else if (!strcmp(key, "start_us")) a->start_us = n;
		else if (!strcmp(key, "samples")) a->samples = n;
		else if (!strcmp(key, "running")) a->running = n != 0;
		else fault(p, "acct has no key \"%s\"", key);
	}
	if (!a->pid)
		fault(p, "acct needs pid=N");
	if (a->samples < 0)
		a->samples = a->time_ms / 1000;
	a->sum_util = a->util * 100 * a->samples;
	a->sum_memutil = a->memutil * 100 * a->samples;
}

static void parse_at(struct parser *p)
{
	int64_t at = 0;
	char *time = next(p), *what, *key, *text;
	instant(p, time, &at);
	what = next(p);
	if (what && !strcmp(what, "gpu")) {
		int gpu = need_gpu(p, false);
		while (pair(p, &key, &text)) {
			struct change change = {.at_us = at, .gpu = gpu};
			if (!gpu_attr(p, key, text, &change.attr, &change.value))
				fault(p, "at … gpu has no key \"%s\"", key);
			else
				*PUSH(p->s->changes, p->s->n_changes) = change;
		}
	} else if (what && !strcmp(what, "xid")) {
		struct xid x = {.at_us = at, .gpu = need_gpu(p, false), .gi = -1, .ci = -1};
		int64_t n;
		x.code = (unsigned long long)need_integer(p, "XID");
		while (pair(p, &key, &text)) {
			if (!strcmp(key, "gi") && integer(p, key, text, &n)) x.gi = (int)n;
			else if (!strcmp(key, "ci") && integer(p, key, text, &n)) x.ci = (int)n;
			else fault(p, "at … xid has no key \"%s\"", key);
		}
		for (int i = 0; i < p->s->n_xids; i++) {
			struct xid *o = &p->s->xids[i];
			x.occurrence += o->at_us == x.at_us && o->gpu == x.gpu && o->code == x.code;
		}
		*PUSH(p->s->xids, p->s->n_xids) = x;
	} else
		fault(p, "at TIME is followed by gpu or xid, not \"%s\"", what ? what : "");
}

static void parse_rule(struct parser *p, enum rule_kind kind)
{
	struct rule *r = PUSH(p->s->rules, p->s->n_rules);
	*r = (struct rule){.kind = kind, .gpu = need_gpu(p, true), .count = -1, .id = p->line_hash};
	char *function = next(p);
	bool known = function && !strcmp(function, "*");
	for (const char *const *f = known_functions; function && *f && !known; f++)
		known = !strcmp(function, *f);
	if (!known)
		fault(p, "the library has no function \"%s\"", function ? function : "");
	r->function = strdup(function ? function : "");
	if (kind == RULE_FAULT) {
		r->result = (int)need_integer(p, "return code");
		if (p->next < p->words)
			r->count = need_integer(p, "count");
	} else if (kind == RULE_DELAY)
		r->delay_us = need_integer(p, "microseconds");
}

static void parse_quirk(struct parser *p)
{
	struct quirk *q = PUSH(p->s->quirks, p->s->n_quirks);
	q->gpu = need_gpu(p, true);
	char *name = next(p);
	int i;
	if (name && one_of(name, quirk_names, QUIRKS, &i))
		q->kind = (enum quirk_kind)i;
	else
		fault(p, "there is no quirk \"%s\"", name ? name : "");
	q->n = p->next < p->words ? need_integer(p, "number") : 0;
}

static char *need_word(struct parser *p, const char *what)
{
	char *word = next(p);
	if (!word)
		fault(p, "%s needs a value", what);
	return strdup(word ? word : "");
}

static void parse_line(struct parser *p)
{
	char *kind = next(p);
	struct scenario *s = p->s;
	if (!kind)
		return;
	if (!strcmp(kind, "driver")) { free(s->driver); s->driver = need_word(p, kind); }
	else if (!strcmp(kind, "nvml")) { free(s->nvml); s->nvml = need_word(p, kind); }
	else if (!strcmp(kind, "cuda")) s->cuda = (int)need_integer(p, kind);
	else if (!strcmp(kind, "init_ret")) s->init_ret = (int)need_integer(p, kind);
	else if (!strcmp(kind, "epoch")) next(p); /* read before all other lines */
	else if (!strcmp(kind, "ring")) s->ring = (unsigned)need_integer(p, kind);
	else if (!strcmp(kind, "gpu")) parse_gpu(p);
	else if (!strcmp(kind, "proc")) parse_proc(p);
	else if (!strcmp(kind, "mig")) parse_mig(p);
	else if (!strcmp(kind, "acct")) parse_acct(p);
	else if (!strcmp(kind, "at")) parse_at(p);
	else if (!strcmp(kind, "fault")) parse_rule(p, RULE_FAULT);
	else if (!strcmp(kind, "delay")) parse_rule(p, RULE_DELAY);
	else if (!strcmp(kind, "hang")) parse_rule(p, RULE_HANG);
	else if (!strcmp(kind, "quirk")) parse_quirk(p);
	else { fault(p, "there is no line \"%s\"", kind); return; }
	if (p->next < p->words)
		fault(p, "\"%s\" is one word too many", p->word[p->next]);
}

/* Insertion sort by time: stable, so that of two changes at one instant the
 * later line wins. */
#define SORT_BY_TIME(array, n)                                                          \
	for (int i = 1; i < (n); i++)                                                   \
		for (int j = i; j > 0 && (array)[j - 1].at_us > (array)[j].at_us; j--) { \
			__typeof__((array)[0]) swap = (array)[j];                       \
			(array)[j] = (array)[j - 1];                                    \
			(array)[j - 1] = swap;                                          \
		}

/* Times may stand above the epoch line, so that one is looked for first. */
static void find_epoch(struct parser *p, const char *text)
{
	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		char value[64];
		while (*line == ' ' || *line == '\t')
			line++;
		if (sscanf(line, "epoch %63s", value) == 1)
			instant(p, value, &p->s->epoch_us);
	}
}

/* Defaults and checks that need every line. */
static void finish(struct parser *p)
{
	struct scenario *s = p->s;
	p->line = 0;
	while (s->gpus < MAX_GPUS && s->gpu[s->gpus].present)
		s->gpus++;
	for (int i = s->gpus; i < MAX_GPUS; i++)
		if (s->gpu[i].present)
			fault(p, "gpu %d is there but gpu %d is not", i, s->gpus);
#define CHECK(array, n, kind)                                                     \
	for (int i = 0; i < (n); i++)                                             \
		if ((array)[i].gpu >= s->gpus)                                    \
			fault(p, "%s names gpu %d, which is not there", kind, (array)[i].gpu)
	CHECK(s->procs, s->n_procs, "proc");
	CHECK(s->migs, s->n_migs, "mig");
	CHECK(s->accounts, s->n_accounts, "acct");
	CHECK(s->changes, s->n_changes, "at");
	CHECK(s->xids, s->n_xids, "xid");
	for (int i = 0; i < s->gpus; i++) {
		struct gpu *g = &s->gpu[i];
		if ((!g->text[T_UUID] && asprintf(&g->text[T_UUID], "GPU-00000000-0000-4000-8000-%012x", i) < 0) ||
		    (!g->text[T_PCI] && asprintf(&g->text[T_PCI], "00000000:%02X:00.0", i + 1) < 0))
			abort();
		if (!g->text[T_NAME])
			g->text[T_NAME] = strdup("NVIDIA Lab GPU");
	}
	for (int i = 0; i < s->n_migs; i++) {
		struct instance *m = &s->migs[i];
		if (m->uuid)
			continue;
		const char *parent = s->gpu[m->gpu].text[T_UUID] ? s->gpu[m->gpu].text[T_UUID] : "";
		uint64_t h = hash_bytes(0, parent, strlen(parent));
		if (asprintf(&m->uuid, "MIG-%08x-%04x-5%03x-8%03x-%012" PRIx64, (unsigned)h, (unsigned)(h >> 32) & 0xffff,
			     m->gi & 0xfff, m->ci & 0xfff, h >> 16) < 0)
			abort();
	}
	SORT_BY_TIME(s->changes, s->n_changes);
	SORT_BY_TIME(s->xids, s->n_xids);
}

struct scenario *scenario_parse(char *text, const char *path, int64_t default_epoch_us)
{
	struct scenario *s = calloc(1, sizeof *s);
	char *copy = strdup(path);
	if (!s || !copy)
		abort();
	s->driver = strdup(profile_driver);
	s->directory = strdup(dirname(copy));
	free(copy);
	s->cuda = profile_cuda;
	s->ring = RING_SAMPLES;
	s->epoch_us = default_epoch_us;
	struct parser p = {.s = s, .path = path};
	find_epoch(&p, text);
	for (char *line = text, *end; line; line = end) {
		end = strchr(line, '\n');
		if (end)
			*end++ = 0;
		p.line++;
		p.line_hash = hash_bytes(0, line, strlen(line));
		cut(&p, line);
		parse_line(&p);
	}
	finish(&p);
	if (p.faults) {
		scenario_free(s);
		return NULL;
	}
	return s;
}

void scenario_free(struct scenario *s)
{
	for (int i = 0; i < MAX_GPUS; i++)
		for (int t = 0; t < TEXTS; t++)
			free(s->gpu[i].text[t]);
	for (int i = 0; i < s->n_procs; i++)
		free(s->procs[i].pid_file);
	for (int i = 0; i < s->n_migs; i++) {
		free(s->migs[i].profile);
		free(s->migs[i].uuid);
	}
	for (int i = 0; i < s->n_rules; i++)
		free(s->rules[i].function);
	free(s->procs);
	free(s->migs);
	free(s->accounts);
	free(s->changes);
	free(s->xids);
	free(s->rules);
	free(s->quirks);
	free(s->driver);
	free(s->nvml);
	free(s->directory);
	free(s);
}
