/* What a card says of itself: identity, sensors, clocks, link, errors. */
#include "lab.h"

#include <string.h>

#define CARD_TEXT(function, which)                                                 \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned length) \
	{                                                                          \
		BEGIN(device, IDENTITY);                                           \
		return give_text(c.s->gpu[c.gpu].text[which], out, length);        \
	}
#define CARD_NUMBER(function, attr, otherwise)                             \
	EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *out) \
	{                                                                \
		BEGIN(device, CARD_ONLY);                                \
		return give(&c, attr, otherwise, out);                   \
	}

CARD_TEXT(nvmlDeviceGetSerial, T_SERIAL)
CARD_TEXT(nvmlDeviceGetVbiosVersion, T_VBIOS)
CARD_TEXT(nvmlDeviceGetBoardPartNumber, T_PART)

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned length)
{
	BEGIN(device, IDENTITY);
	return give_text(c.mig ? c.mig->uuid : c.s->gpu[c.gpu].text[T_UUID], out, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned length)
{
	BEGIN(device, IDENTITY);
	char text[256];
	snprintf(text, sizeof text, c.mig ? "%s MIG %s" : "%s", c.s->gpu[c.gpu].text[T_NAME], c.mig ? c.mig->profile : "");
	return give_text(text, out, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
	BEGIN(device, IDENTITY);
	NEED(index);
	if (c.mig)
		return NVML_ERROR_NOT_SUPPORTED;
	*index = (unsigned)c.gpu;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
	BEGIN(device, CARD_ONLY);
	return give(&c, A_MINOR, c.gpu, minor);
}

static nvmlReturn_t pci(const struct call *c, nvmlPciInfo_t *out, bool v3)
{
	NEED(out);
	const char *id = c->s->gpu[c->gpu].text[T_PCI];
	unsigned domain = 0, bus = 0, dev = 0;
	sscanf(id, "%x:%x:%x", &domain, &bus, &dev);
	/* The first two versions end before busId. */
	memset(out, 0, v3 ? sizeof *out : (size_t)((char *)out->busId - (char *)out));
	out->domain = domain;
	out->bus = bus;
	out->device = dev;
	out->pciDeviceId = 0x233510de;
	out->pciSubSystemId = 0x18be10de;
	snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, dev & 0xff);
	if (v3)
		snprintf(out->busId, sizeof out->busId, "%s", id);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *out) { BEGIN(device, IDENTITY); return pci(&c, out, false); }
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *out) { BEGIN(device, IDENTITY); return pci(&c, out, false); }
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out) { BEGIN(device, IDENTITY); return pci(&c, out, true); }

CARD_NUMBER(nvmlDeviceGetPersistenceMode, A_PERSISTENCE, 1)
CARD_NUMBER(nvmlDeviceGetComputeMode, A_COMPUTE_MODE, 0)
CARD_NUMBER(nvmlDeviceGetArchitecture, A_ARCH, NVML_DEVICE_ARCH_HOPPER)
CARD_NUMBER(nvmlDeviceGetNumGpuCores, A_CORES, 16896)
CARD_NUMBER(nvmlDeviceGetMemoryBusWidth, A_BUS_WIDTH, 5120)
CARD_NUMBER(nvmlDeviceGetPerformanceState, A_PSTATE, 0)
CARD_NUMBER(nvmlDeviceGetPowerState, A_PSTATE, 0)

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *out)
{
	BEGIN(device, IDENTITY);
	NEED(out);
	*out = NVML_BRAND_NVIDIA;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	BEGIN(device, IDENTITY);
	NEED(major && minor);
	*major = (int)number_at(c.s, c.gpu, A_CUDA_MAJOR, c.now, 9);
	*minor = (int)number_at(c.s, c.gpu, A_CUDA_MINOR, c.now, 0);
	return NVML_SUCCESS;
}

/* Temperature and fans. */

static struct value threshold(const struct call *c, unsigned which)
{
	static const struct { enum attr attr; int64_t otherwise; } of[] = {
		[NVML_TEMPERATURE_THRESHOLD_SHUTDOWN] = {A_TEMP_SHUTDOWN, 92},
		[NVML_TEMPERATURE_THRESHOLD_SLOWDOWN] = {A_TEMP_SLOWDOWN, 89},
		[NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = {A_TEMP_MEM_MAX, 95},
		[NVML_TEMPERATURE_THRESHOLD_GPU_MAX] = {A_TEMP_GPU_MAX, 87},
	};
	if (which >= sizeof of / sizeof *of)
		return (struct value){NOT_AVAILABLE, 0};
	struct value v = value_at(c->s, c->gpu, of[which].attr, c->now);
	return v.state == UNSET ? (struct value){SET, of[which].otherwise} : v;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(sensor == NVML_TEMPERATURE_GPU);
	return give(&c, A_TEMP, 35, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out && out->sensorType == NVML_TEMPERATURE_GPU);
	if (out->version != nvmlTemperature_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return give(&c, A_TEMP, 35, (unsigned *)&out->temperature);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t which, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out && which < NVML_TEMPERATURE_THRESHOLD_COUNT);
	struct value v = threshold(&c, which);
	*out = (unsigned)v.n;
	return v.state == SET ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (out->version != nvmlMarginTemperature_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	struct value slowdown = threshold(&c, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN);
	unsigned now;
	nvmlReturn_t ret = give(&c, A_TEMP, 35, &now);
	if (ret != NVML_SUCCESS || slowdown.state != SET)
		return NVML_ERROR_NOT_SUPPORTED;
	out->marginTemperature = (int)slowdown.n - (int)now;
	return NVML_SUCCESS;
}

static unsigned fans(const struct call *c)
{
	bool some = value_at(c->s, c->gpu, A_FAN, c->now).state == SET;
	return (unsigned)number_at(c->s, c->gpu, A_FANS, c->now, some);
}

EXPORT nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (!fans(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = fans(&c);
	return NVML_SUCCESS;
}

CARD_NUMBER(nvmlDeviceGetFanSpeed, A_FAN, NONE)

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	if (!fans(&c))
		return NVML_ERROR_NOT_SUPPORTED;
	NEED(fan < fans(&c));
	return give(&c, A_FAN, NONE, out);
}

/* Power and energy. */

CARD_NUMBER(nvmlDeviceGetPowerUsage, A_POWER, 70000)
CARD_NUMBER(nvmlDeviceGetPowerManagementLimit, A_POWER_LIMIT, 700000)
CARD_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, A_POWER_DEFAULT, 700000)

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	struct value v = value_at(c.s, c.gpu, A_POWER_ENFORCED, c.now);
	return v.state == UNSET ? give(&c, A_POWER_LIMIT, 700000, out) : give(&c, A_POWER_ENFORCED, NONE, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *min, unsigned *max)
{
	BEGIN(device, CARD_ONLY);
	nvmlReturn_t ret = give(&c, A_POWER_MIN, 200000, min);
	return ret == NVML_SUCCESS ? give(&c, A_POWER_MAX, 700000, max) : ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	*out = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out);
	if (value_at(c.s, c.gpu, A_ENERGY, c.now).state == NOT_AVAILABLE)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = energy_mj(c.s, c.gpu, c.now);
	return NVML_SUCCESS;
}

/* Clocks. */

static nvmlReturn_t clock_mhz(const struct call *c, nvmlClockType_t type, bool max, unsigned *out)
{
	static const struct { enum attr now, max; int64_t otherwise; } of[] = {
		[NVML_CLOCK_GRAPHICS] = {A_GRAPHICS_MHZ, A_MAX_GRAPHICS_MHZ, 1980},
		[NVML_CLOCK_SM] = {A_SM_MHZ, A_MAX_SM_MHZ, 1980},
		[NVML_CLOCK_MEM] = {A_MEM_MHZ, A_MAX_MEM_MHZ, 3201},
		[NVML_CLOCK_VIDEO] = {A_VIDEO_MHZ, A_MAX_VIDEO_MHZ, 1545},
	};
	NEED(type < sizeof of / sizeof *of);
	return give(c, max ? of[type].max : of[type].now, of[type].otherwise, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *out) { BEGIN(device, CARD_ONLY); return clock_mhz(&c, type, false, out); }
EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *out) { BEGIN(device, CARD_ONLY); return clock_mhz(&c, type, true, out); }
EXPORT nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned *out) { BEGIN(device, CARD_ONLY); return clock_mhz(&c, type, true, out); }
EXPORT nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned *out) { BEGIN(device, CARD_ONLY); return clock_mhz(&c, type, true, out); }

EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	return clock_mhz(&c, type, id != NVML_CLOCK_ID_CURRENT, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *out) { BEGIN(device, CARD_ONLY); return give_long(&c, A_THROTTLE, 0, out); }
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *out) { BEGIN(device, CARD_ONLY); return give_long(&c, A_THROTTLE, 0, out); }

static nvmlReturn_t all_reasons(const struct call *c, unsigned long long *out)
{
	(void)c;
	NEED(out);
	*out = 0x1ff;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *out) { BEGIN(device, CARD_ONLY); return all_reasons(&c, out); }
EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *out) { BEGIN(device, CARD_ONLY); return all_reasons(&c, out); }

/* PCIe. */

CARD_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, A_PCIE_GEN, 5)
CARD_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, A_PCIE_GEN_MAX, 5)
CARD_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, A_PCIE_GEN_MAX, 5)
CARD_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, A_PCIE_WIDTH, 16)
CARD_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, A_PCIE_WIDTH_MAX, 16)
CARD_NUMBER(nvmlDeviceGetPcieReplayCounter, A_PCIE_REPLAYS, 0)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned *out)
{
	BEGIN(device, CARD_ONLY);
	return give(&c, counter == NVML_PCIE_UTIL_TX_BYTES ? A_PCIE_TX : A_PCIE_RX, 0, out);
}

/* Memory errors. */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	BEGIN(device, CARD_ONLY);
	NEED(current && pending);
	nvmlReturn_t ret = give(&c, A_ECC, 1, current);
	if (ret == NVML_SUCCESS)
		*pending = *current;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t kind, nvmlEccCounterType_t counter, unsigned long long *out)
{
	static const enum attr of[2][2] = {{A_ECC_CORRECTED, A_ECC_CORRECTED_AGG}, {A_ECC_UNCORRECTED, A_ECC_UNCORRECTED_AGG}};
	BEGIN(device, CARD_ONLY);
	NEED(kind < 2 && counter < 2);
	if (!number_at(c.s, c.gpu, A_ECC, c.now, 1))
		return NVML_ERROR_NOT_SUPPORTED;
	return give_long(&c, of[kind][counter], 0, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
{
	BEGIN(device, CARD_ONLY);
	NEED(corrected && uncorrected && pending && failure);
	nvmlReturn_t ret = give(&c, A_REMAPPED_CORRECTED, 0, corrected);
	if (ret == NVML_SUCCESS)
		ret = give(&c, A_REMAPPED_UNCORRECTED, 0, uncorrected);
	if (ret == NVML_SUCCESS)
		ret = give(&c, A_REMAP_PENDING, 0, pending);
	return ret == NVML_SUCCESS ? give(&c, A_REMAP_FAILURE, 0, failure) : ret;
}

/* Pages are counted; their addresses are invented. */
static nvmlReturn_t retired(const struct call *c, unsigned cause, unsigned *count, unsigned long long *addresses, unsigned long long *times)
{
	NEED(count && cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
	unsigned n;
	/* Cards with row remapping have no page retirement. */
	nvmlReturn_t ret = give(c, cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR ? A_RETIRED_DBE : A_RETIRED_SBE, NONE, &n);
	if (ret != NVML_SUCCESS)
		return ret;
	bool fits = addresses && *count >= n;
	*count = n;
	if (!fits)
		return n ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	for (unsigned i = 0; i < n; i++) {
		addresses[i] = (i + 1ull) << 16;
		if (times)
			times[i] = (unsigned long long)c->s->epoch_us;
	}
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned *count, unsigned long long *addresses)
{
	BEGIN(device, CARD_ONLY);
	return retired(&c, cause, count, addresses, NULL);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned *count, unsigned long long *addresses, unsigned long long *times)
{
	BEGIN(device, CARD_ONLY);
	return retired(&c, cause, count, addresses, times);
}

CARD_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, A_RETIRED_PENDING, NONE)

/* NVLink. */

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t *out)
{
	BEGIN(device, CARD_ONLY);
	NEED(out && link < NVML_NVLINK_MAX_LINKS);
	if (link >= (unsigned)number_at(c.s, c.gpu, A_NVLINKS, c.now, 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

/* A card's counts stand on its first link. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, nvmlNvLinkErrorCounter_t counter, unsigned long long *out)
{
	static const enum attr of[] = {
		[NVML_NVLINK_ERROR_DL_REPLAY] = A_NVLINK_REPLAY, [NVML_NVLINK_ERROR_DL_RECOVERY] = A_NVLINK_RECOVERY,
		[NVML_NVLINK_ERROR_DL_CRC_FLIT] = A_NVLINK_CRC, [NVML_NVLINK_ERROR_DL_CRC_DATA] = A_NVLINK_CRC,
	};
	BEGIN(device, CARD_ONLY);
	NEED(out && link < NVML_NVLINK_MAX_LINKS && counter < sizeof of / sizeof *of);
	if (link >= (unsigned)number_at(c.s, c.gpu, A_NVLINKS, c.now, 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = 0;
	return link || counter == NVML_NVLINK_ERROR_DL_CRC_DATA ? NVML_SUCCESS : give_long(&c, of[counter], 0, out);
}
