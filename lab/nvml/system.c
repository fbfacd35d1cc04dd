/* The driver, the cards as a list, and error texts. */
#include "lab.h"

#include <string.h>
#include <strings.h>

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
	static const struct { nvmlReturn_t code; const char *text; } texts[] = {
		{NVML_SUCCESS, "Success"}, {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
		{NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"}, {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
		{NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"}, {NVML_ERROR_ALREADY_INITIALIZED, "Already Initialized"},
		{NVML_ERROR_NOT_FOUND, "Not Found"}, {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
		{NVML_ERROR_INSUFFICIENT_POWER, "Insufficient External Power"}, {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"},
		{NVML_ERROR_TIMEOUT, "Timeout"}, {NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue"},
		{NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"}, {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"},
		{NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM"}, {NVML_ERROR_GPU_IS_LOST, "GPU is lost"},
		{NVML_ERROR_RESET_REQUIRED, "GPU requires restart"}, {NVML_ERROR_OPERATING_SYSTEM, "The operating system has blocked the request."},
		{NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch."},
		{NVML_ERROR_IN_USE, "In use by another client"}, {NVML_ERROR_MEMORY, "Insufficient memory"},
		{NVML_ERROR_NO_DATA, "No data"}, {NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient resources"},
		{NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"}, {NVML_ERROR_GPU_NOT_FOUND, "GPU not found"},
	};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (texts[i].code == result)
			return texts[i].text;
	return "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
	BEGIN_SYSTEM();
	return give_text(c.s->driver, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
	BEGIN_SYSTEM();
	char text[160];
	snprintf(text, sizeof text, "%d.%s", c.s->cuda / 1000, c.s->driver);
	return give_text(c.s->nvml ? c.s->nvml : text, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	BEGIN_SYSTEM();
	NEED(version);
	*version = c.s->cuda;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	BEGIN_SYSTEM();
	NEED(version);
	*version = c.s->cuda;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned length)
{
	BEGIN_SYSTEM();
	NEED(info);
	if (info->version != nvmlSystemDriverBranchInfo_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	char text[64];
	snprintf(text, sizeof text, "r%.*s_00", (int)strcspn(c.s->driver, "."), c.s->driver);
	return give_text(text, info->branch, length < sizeof info->branch ? length : sizeof info->branch);
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
	BEGIN_SYSTEM();
	NEED(name && length);
	char path[64], text[4096];
	snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
	FILE *f = fopen(path, "re");
	if (!f)
		return NVML_ERROR_NOT_FOUND;
	size_t n = fread(text, 1, sizeof text - 1, f);
	fclose(f);
	text[n] = 0;
	snprintf(name, length, "%s", text);
	return NVML_SUCCESS;
}

static nvmlReturn_t count(const struct call *c, unsigned *n)
{
	NEED(n);
	*n = (unsigned)c->s->gpus; /* lost and refused ones are counted too */
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *n) { BEGIN_SYSTEM(); return count(&c, n); }
EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) { BEGIN_SYSTEM(); return count(&c, n); }

static nvmlReturn_t look_up(const char *function, struct call *c, int gpu, nvmlDevice_t *device)
{
	NEED(device);
	NEED(gpu >= 0 && gpu < c->s->gpus);
	struct call d = call_device(function, card_handle(gpu), IDENTITY);
	nvmlReturn_t ret = d.ret;
	call_end(&d);
	if (ret == NVML_SUCCESS)
		*device = card_handle(gpu);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	return look_up(__func__, &c, index < MAX_GPUS ? (int)index : -1, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	return look_up(__func__, &c, index < MAX_GPUS ? (int)index : -1, device);
}

static int find(const struct scenario *s, enum text which, const char *text)
{
	for (int i = 0; text && i < s->gpus; i++)
		if (s->gpu[i].text[which] && !strcasecmp(s->gpu[i].text[which], text))
			return i;
	return -1;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	NEED(uuid && device);
	for (int i = 0; i < c.s->n_migs; i++) {
		const struct instance *m = &c.s->migs[i];
		if (strcmp(m->uuid, uuid) || !instance_alive(m, c.now) || !mig_enabled(c.s, m->gpu, c.now))
			continue;
		nvmlReturn_t ret = card_state(c.s, m->gpu, c.now);
		if (ret == NVML_SUCCESS)
			*device = instance_handle(m);
		return ret;
	}
	int gpu = find(c.s, T_UUID, uuid);
	return gpu < 0 ? NVML_ERROR_NOT_FOUND : look_up(__func__, &c, gpu, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	int gpu = find(c.s, T_SERIAL, serial);
	return gpu < 0 ? NVML_ERROR_NOT_FOUND : look_up(__func__, &c, gpu, device);
}

static nvmlReturn_t by_pci(const char *function, struct call *c, const char *id, nvmlDevice_t *device)
{
	NEED(id);
	int gpu = find(c->s, T_PCI, id);
	/* The legacy form has a domain of four digits. */
	for (int i = 0; gpu < 0 && i < c->s->gpus; i++)
		if (strlen(c->s->gpu[i].text[T_PCI]) > 4 && !strcasecmp(c->s->gpu[i].text[T_PCI] + 4, id))
			gpu = i;
	return gpu < 0 ? NVML_ERROR_NOT_FOUND : look_up(function, c, gpu, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	return by_pci(__func__, &c, id, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
	BEGIN_SYSTEM();
	return by_pci(__func__, &c, id, device);
}
