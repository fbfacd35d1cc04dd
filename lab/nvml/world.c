/* The current scenario, and what it says at an instant. */
#define _GNU_SOURCE
#include "lab.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The file is looked at no more often than this, whatever the call rate. */
enum { LOOK_EVERY_US = 50000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct scenario *current;
static int64_t looked_us = INT64_MIN;
static struct stat seen;
static bool have_seen;
static int complained_errno;

int64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int64_t monotonic_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void sleep_us(int64_t us)
{
	struct timespec t = {us / 1000000, us % 1000000 * 1000};
	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

uint64_t hash_bytes(uint64_t h, const void *data, size_t n)
{
	const unsigned char *b = data;
	h ^= 0xcbf29ce484222325u;
	while (n--)
		h = (h ^ *b++) * 0x100000001b3u;
	return h;
}

static char *read_all(int fd)
{
	size_t size = 0, room = 65536;
	char *text = malloc(room + 1);
	while (text) {
		ssize_t n = read(fd, text + size, room - size);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			text[size] = 0;
			return text;
		}
		size += (size_t)n;
		if (size == room)
			text = realloc(text, (room *= 2) + 1);
	}
	return NULL;
}

static void read_pid_files(struct scenario *s)
{
	for (int i = 0; i < s->n_procs; i++) {
		if (!s->procs[i].pid_file)
			continue;
		unsigned pid = 0;
		FILE *f = fopen(s->procs[i].pid_file, "re");
		if (f) {
			if (fscanf(f, "%u", &pid) != 1)
				pid = 0;
			fclose(f);
		}
		__atomic_store_n(&s->procs[i].pid, pid, __ATOMIC_RELAXED);
	}
}

static void replace(struct scenario *s)
{
	if (current && --current->references == 0)
		scenario_free(current);
	current = s;
	if (s)
		s->references = 1;
}

static void look(void)
{
	const char *path = getenv("GPULAB_SCENARIO");
	struct stat st;
	FILE *f = NULL;
	if (!path || !*path || !(f = fopen(path, "re")) || fstat(fileno(f), &st)) {
		int e = path && *path ? errno : EDESTADDRREQ;
		if (complained_errno != e)
			fprintf(stderr, "gpulab: GPULAB_SCENARIO=%s: %s\n", path ? path : "",
				e == EDESTADDRREQ ? "set it to a scenario file" : strerror(e));
		complained_errno = e;
		have_seen = false;
		replace(NULL);
		if (f)
			fclose(f);
		return;
	}
	complained_errno = 0;
	bool same = have_seen && st.st_ino == seen.st_ino && st.st_dev == seen.st_dev && st.st_size == seen.st_size &&
		    st.st_mtim.tv_sec == seen.st_mtim.tv_sec && st.st_mtim.tv_nsec == seen.st_mtim.tv_nsec;
	if (!same) {
		char *text = read_all(fileno(f));
		seen = st;
		have_seen = true;
		replace(text ? scenario_parse(text, path, (int64_t)st.st_mtim.tv_sec * 1000000 + st.st_mtim.tv_nsec / 1000) : NULL);
		free(text);
	}
	fclose(f);
	if (current)
		read_pid_files(current);
}

struct scenario *world_get(void)
{
	pthread_mutex_lock(&lock);
	int64_t t = monotonic_us();
	if (looked_us == INT64_MIN || t - looked_us >= LOOK_EVERY_US) {
		looked_us = t;
		look();
	}
	struct scenario *s = current;
	if (s)
		s->references++;
	pthread_mutex_unlock(&lock);
	return s;
}

void world_put(struct scenario *s)
{
	if (!s)
		return;
	pthread_mutex_lock(&lock);
	if (--s->references == 0)
		scenario_free(s);
	pthread_mutex_unlock(&lock);
}

/* A fork may come while another thread holds the lock. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void at_load(void) { pthread_atfork(before_fork, after_fork, after_fork); }

struct value value_at(const struct scenario *s, int gpu, enum attr a, int64_t t)
{
	struct value v = s->gpu[gpu].attr[a];
	for (int i = 0; i < s->n_changes && s->changes[i].at_us <= t; i++)
		if (s->changes[i].gpu == gpu && s->changes[i].attr == a)
			v = s->changes[i].value;
	return v;
}

int64_t number_at(const struct scenario *s, int gpu, enum attr a, int64_t t, int64_t otherwise)
{
	struct value v = value_at(s, gpu, a, t);
	return v.state == SET ? v.n : otherwise;
}

const struct quirk *quirk_of(const struct scenario *s, int gpu, enum quirk_kind k)
{
	for (int i = 0; i < s->n_quirks; i++)
		if (s->quirks[i].kind == k && (s->quirks[i].gpu == gpu || s->quirks[i].gpu < 0))
			return &s->quirks[i];
	return NULL;
}

bool mig_enabled(const struct scenario *s, int gpu, int64_t t)
{
	struct value v = value_at(s, gpu, A_MIG, t);
	if (v.state != UNSET)
		return v.state == SET && v.n;
	for (int i = 0; i < s->n_migs; i++)
		if (s->migs[i].gpu == gpu)
			return true;
	return false;
}

unsigned process_pid(const struct process *p) { return __atomic_load_n(&p->pid, __ATOMIC_RELAXED); }

bool process_alive(const struct process *p, int64_t t)
{
	/* A pid written out is listed as it is, 0 and 4294967295 too. */
	return p->from_us <= t && t < p->to_us && (!p->pid_file || process_pid(p));
}

bool instance_alive(const struct instance *m, int64_t t) { return m->from_us <= t && t < m->to_us; }

uint64_t memory_used(const struct scenario *s, int gpu, int64_t t)
{
	struct value v = value_at(s, gpu, A_MEM_USED, t);
	if (v.state == SET)
		return (uint64_t)v.n << 20;
	uint64_t sum = 0;
	for (int i = 0; i < s->n_procs; i++) {
		const struct process *p = &s->procs[i];
		if (p->gpu == gpu && !p->memory_na && process_alive(p, t))
			sum += p->memory_bytes;
	}
	return sum;
}

/* The counter's own step, as real ones were seen to have. */
enum { ENERGY_STEP_US = 10000 };

unsigned long long energy_mj(const struct scenario *s, int gpu, int64_t t)
{
	t -= t % ENERGY_STEP_US;
	int64_t base = number_at(s, gpu, A_ENERGY, INT64_MIN, 0), power = number_at(s, gpu, A_POWER, INT64_MIN, 70000);
	int64_t since = s->epoch_us;
	__int128 mj_us = 0; /* mW × µs, which is mJ × 10⁻⁶ */
	for (int i = 0; i < s->n_changes && s->changes[i].at_us <= t; i++) {
		const struct change *c = &s->changes[i];
		if (c->gpu != gpu || (c->attr != A_POWER && c->attr != A_ENERGY))
			continue;
		if (c->at_us > since) {
			mj_us += (__int128)power * (c->at_us - since);
			since = c->at_us;
		}
		if (c->attr == A_POWER)
			power = c->value.state == SET ? c->value.n : 0;
		else if (c->value.state == SET) { /* a driver reload */
			base = c->value.n;
			mj_us = 0;
		}
	}
	if (t > since)
		mj_us += (__int128)power * (t - since);
	return (unsigned long long)(base + (int64_t)(mj_us / 1000000));
}

unsigned long long throttled_ns(const struct scenario *s, int gpu, unsigned long long bit, int64_t t)
{
	int64_t reasons = number_at(s, gpu, A_THROTTLE, INT64_MIN, 0), since = s->epoch_us, us = 0;
	for (int i = 0; i < s->n_changes && s->changes[i].at_us <= t; i++) {
		const struct change *c = &s->changes[i];
		if (c->gpu != gpu || c->attr != A_THROTTLE)
			continue;
		if (c->at_us > since) {
			us += (unsigned long long)reasons & bit ? c->at_us - since : 0;
			since = c->at_us;
		}
		reasons = c->value.state == SET ? c->value.n : 0;
	}
	if (t > since && (unsigned long long)reasons & bit)
		us += t - since;
	return (unsigned long long)us * 1000;
}
