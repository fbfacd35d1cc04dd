/*
 * A stand-in libnvidia-ml: what a GPU driver says, computed from a text
 * scenario and the wall clock and from nothing else, so that every process
 * that loads the library sees the same world.
 *
 * A scenario is parsed into an immutable `struct scenario` with a reference
 * count. Each NVML call takes a reference, reads the clock once and evaluates.
 */
#ifndef GPULAB_LAB_H
#define GPULAB_LAB_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <nvml.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_GPUS = 64, RING_HZ = 6, RING_SAMPLES = 72, MAX_FANS = 8 };

/* The engines of a utilisation sample, in NVML's order. */
enum engine { ENGINE_SM, ENGINE_MEMORY, ENGINE_ENCODER, ENGINE_DECODER, ENGINES };

/* Numeric attributes of a gpu line; scenario.c holds their names. */
enum attr {
	A_MEM_TOTAL, A_MEM_USED, A_MEM_RESERVED,
	A_UTIL, A_MEMUTIL, A_ENC, A_DEC,
	A_TEMP, A_MEM_TEMP, A_TEMP_SHUTDOWN, A_TEMP_SLOWDOWN, A_TEMP_MEM_MAX, A_TEMP_GPU_MAX,
	A_POWER, A_POWER_LIMIT, A_POWER_ENFORCED, A_POWER_DEFAULT, A_POWER_MIN, A_POWER_MAX, A_ENERGY,
	A_GRAPHICS_MHZ, A_SM_MHZ, A_MEM_MHZ, A_VIDEO_MHZ,
	A_MAX_GRAPHICS_MHZ, A_MAX_SM_MHZ, A_MAX_MEM_MHZ, A_MAX_VIDEO_MHZ,
	A_FAN, A_FANS, A_THROTTLE,
	A_PCIE_GEN, A_PCIE_GEN_MAX, A_PCIE_WIDTH, A_PCIE_WIDTH_MAX, A_PCIE_REPLAYS, A_PCIE_TX, A_PCIE_RX,
	A_ECC, A_ECC_CORRECTED, A_ECC_UNCORRECTED, A_ECC_CORRECTED_AGG, A_ECC_UNCORRECTED_AGG,
	A_REMAPPED_CORRECTED, A_REMAPPED_UNCORRECTED, A_REMAP_PENDING, A_REMAP_FAILURE,
	A_RETIRED_SBE, A_RETIRED_DBE, A_RETIRED_PENDING,
	A_NVLINKS, A_NVLINK_CRC, A_NVLINK_REPLAY, A_NVLINK_RECOVERY,
	A_MIG, A_SLICES, A_PERSISTENCE, A_PSTATE, A_COMPUTE_MODE, A_MINOR, A_ACCOUNTING,
	A_RECOVERY, A_ARCH, A_CUDA_MAJOR, A_CUDA_MINOR, A_CORES, A_BUS_WIDTH,
	A_LOST, A_FAIL,
	ATTRS
};

enum text { T_UUID, T_NAME, T_SERIAL, T_VBIOS, T_PCI, T_PART, TEXTS };

/* One value of an attribute: unset, not available on this card, or a number. */
struct value {
	enum { UNSET, NOT_AVAILABLE, SET } state;
	int64_t n;
};

struct gpu {
	bool present;
	char *text[TEXTS];
	struct value attr[ATTRS];
};

/* `at TIME gpu G KEY=VALUE`: a change that holds from then on. */
struct change {
	int64_t at_us;
	int gpu;
	enum attr attr;
	struct value value;
};

struct process {
	int gpu;
	unsigned pid;
	char *pid_file;     /* owned; pid is read from it while it is there */
	char type;          /* C, G or M */
	bool memory_na;
	uint64_t memory_bytes;
	int64_t util[ENGINES];
	int64_t from_us, to_us;
	int gi, ci;         /* -1 outside MIG */
};

struct instance {
	int gpu, gi, ci;
	char *profile, *uuid;
	int64_t slices, gi_slices, sms;
	uint64_t memory_total_bytes;
	struct value memory_used_bytes;
	int64_t from_us, to_us;
};

struct account {
	int gpu;
	unsigned pid;
	int64_t util, memutil, max_memory_bytes, time_ms, start_us, samples, sum_util, sum_memutil;
	bool running;
	int64_t from_us, to_us;
};

struct xid {
	int64_t at_us;
	int gpu, gi, ci;
	unsigned long long code;
	int occurrence; /* among lines that are otherwise the same */
};

enum rule_kind { RULE_FAULT, RULE_DELAY, RULE_HANG };

struct rule {
	enum rule_kind kind;
	int gpu; /* -1: any, and calls without a device */
	char *function;
	int result;
	int64_t count; /* -1: always */
	int64_t delay_us;
	uint64_t id; /* hash of the line: counts survive a rewritten scenario */
};

/* Ways in which drivers misbehave, `quirk GPU NAME [N]`. */
enum quirk_kind {
	QUIRK_SAMPLES_PROBE_ZERO, QUIRK_SAMPLES_GROW, QUIRK_SAMPLES_GARBAGE,
	QUIRK_LIST_ZERO, QUIRK_LIST_ENDLESS, QUIRK_NO_MIG_PERMISSION, QUIRKS
};

struct quirk { int gpu; enum quirk_kind kind; int64_t n; };

struct scenario {
	int references;
	char *driver, *nvml, *directory;
	int cuda, init_ret;
	int64_t epoch_us;
	unsigned ring; /* the capacity that a probe answers */
	int gpus;
	struct gpu gpu[MAX_GPUS];
	struct change *changes;   int n_changes; /* by time */
	struct process *procs;    int n_procs;
	struct instance *migs;    int n_migs;
	struct account *accounts; int n_accounts;
	struct xid *xids;         int n_xids;    /* by time */
	struct rule *rules;       int n_rules;
	struct quirk *quirks;     int n_quirks;
};

/* scenario.c: text to scenario; NULL with one line per fault on stderr. */
struct scenario *scenario_parse(char *text, const char *path, int64_t default_epoch_us);
void scenario_free(struct scenario *s);

/* world.c: the current scenario, evaluated at an instant. */
struct scenario *world_get(void); /* NULL: none, or it is faulty */
void world_put(struct scenario *s);
int64_t now_us(void);
void sleep_us(int64_t us);
uint64_t hash_bytes(uint64_t h, const void *p, size_t n);

struct value value_at(const struct scenario *s, int gpu, enum attr a, int64_t t);
int64_t number_at(const struct scenario *s, int gpu, enum attr a, int64_t t, int64_t otherwise);
const struct quirk *quirk_of(const struct scenario *s, int gpu, enum quirk_kind k);
bool mig_enabled(const struct scenario *s, int gpu, int64_t t);
unsigned process_pid(const struct process *p); /* 0 while its file is not there */
bool process_alive(const struct process *p, int64_t t);
bool instance_alive(const struct instance *m, int64_t t);
uint64_t memory_used(const struct scenario *s, int gpu, int64_t t);
unsigned long long energy_mj(const struct scenario *s, int gpu, int64_t t);
unsigned long long throttled_ns(const struct scenario *s, int gpu, unsigned long long bit, int64_t t);

/*
 * call.c: what every exported function does first. The call ends when the
 * variable goes out of scope.
 */
/* go-nvml's header wraps each handle in a struct of one pointer; to the ABI it
 * is that pointer. */
struct nvmlDevice_st { int gpu, gi, ci; const char *uuid; };

struct call {
	struct scenario *s;
	int64_t now;
	int gpu;
	const struct instance *mig; /* of a MIG device handle, else NULL */
	nvmlReturn_t ret;
};

enum scope { ANY_DEVICE, CARD_ONLY, MIG_ONLY, IDENTITY };

struct call call_system(const char *function);
struct call call_device(const char *function, nvmlDevice_t device, enum scope scope);
void call_end(struct call *c);
/* Answers for a card as a whole: 0, or the code of a card that doesn't work. */
nvmlReturn_t card_state(const struct scenario *s, int gpu, int64_t t);
nvmlDevice_t card_handle(int gpu);
nvmlDevice_t instance_handle(const struct instance *m);

#define BEGIN_SYSTEM()                                                          \
	__attribute__((cleanup(call_end))) struct call c = call_system(__func__); \
	if (c.ret != NVML_SUCCESS)                                                \
		return c.ret
#define BEGIN(device, scope)                                                                  \
	__attribute__((cleanup(call_end))) struct call c = call_device(__func__, device, scope); \
	if (c.ret != NVML_SUCCESS)                                                              \
		return c.ret
#define NEED(condition)                               \
	if (!(condition))                             \
		return NVML_ERROR_INVALID_ARGUMENT

/* *out = attribute, or the default of a card that a scenario says nothing of. */
nvmlReturn_t give(const struct call *c, enum attr a, int64_t otherwise, unsigned *out);
nvmlReturn_t give_long(const struct call *c, enum attr a, int64_t otherwise, unsigned long long *out);
nvmlReturn_t give_text(const char *text, char *out, unsigned length);
enum { NONE = -1 }; /* as `otherwise`: NOT_SUPPORTED unless the scenario says */

/* ring.c: the driver's 72 samples. */
struct sample {
	int64_t at_us;
	int64_t util[ENGINES];  /* per cent times 100, of the device */
	unsigned pid[ENGINES];  /* credited with all of it; 0 = nobody known */
};
int64_t ring_last_us(int64_t t);
int ring_read(const struct scenario *s, int gpu, int64_t after_us, int64_t t, struct sample out[RING_SAMPLES]);
struct value device_util(const struct scenario *s, int gpu, enum engine e, int64_t t);
/* Mean use of an engine by pid between two instants, per cent times 100. */
int64_t mean_util(const struct scenario *s, int gpu, unsigned pid, enum engine e, int64_t from, int64_t to);

/* profile.c: what differs between driver generations besides their symbols. */
extern const char *const profile_driver;
extern const int profile_cuda;
/* Bytes of one entry of the _v3 process lists (32 in 535.43 … 535.86). */
extern const unsigned profile_process_info_v3_size;

extern const char *const known_functions[];

#endif
