/* Field values: each field answers for itself. */
#include "lab.h"

static nvmlReturn_t put(nvmlFieldValue_t *f, nvmlValueType_t type, unsigned long long v)
{
	f->valueType = type;
	f->value.ullVal = v; /* the other members are its low bytes */
	return NVML_SUCCESS;
}

static nvmlReturn_t number(const struct call *c, nvmlFieldValue_t *f, nvmlValueType_t type, enum attr a, int64_t otherwise)
{
	unsigned long long v;
	nvmlReturn_t ret = give_long(c, a, otherwise, &v);
	return ret == NVML_SUCCESS ? put(f, type, v) : ret;
}

static nvmlReturn_t throttled(const struct call *c, nvmlFieldValue_t *f, unsigned long long bit)
{
	if (value_at(c->s, c->gpu, A_THROTTLE, c->now).state == NOT_AVAILABLE)
		return NVML_ERROR_NOT_SUPPORTED;
	return put(f, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, throttled_ns(c->s, c->gpu, bit, c->now));
}

/* Distance of a threshold from the slowdown temperature. */
static nvmlReturn_t limit(const struct call *c, nvmlFieldValue_t *f, enum attr a, int64_t otherwise)
{
	int64_t slowdown = number_at(c->s, c->gpu, A_TEMP_SLOWDOWN, c->now, 89);
	if (value_at(c->s, c->gpu, a, c->now).state == NOT_AVAILABLE)
		return NVML_ERROR_NOT_SUPPORTED;
	return put(f, NVML_VALUE_TYPE_SIGNED_INT, (unsigned long long)(slowdown - number_at(c->s, c->gpu, a, c->now, otherwise)));
}

static nvmlReturn_t field(const struct call *c, nvmlFieldValue_t *f)
{
	const nvmlValueType_t UINT = NVML_VALUE_TYPE_UNSIGNED_INT, ULL = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
	switch (f->fieldId) {
	case NVML_FI_DEV_ECC_CURRENT:
	case NVML_FI_DEV_ECC_PENDING: return number(c, f, UINT, A_ECC, 1);
	case NVML_FI_DEV_ECC_SBE_VOL_TOTAL: return number(c, f, ULL, A_ECC_CORRECTED, 0);
	case NVML_FI_DEV_ECC_DBE_VOL_TOTAL: return number(c, f, ULL, A_ECC_UNCORRECTED, 0);
	case NVML_FI_DEV_ECC_SBE_AGG_TOTAL: return number(c, f, ULL, A_ECC_CORRECTED_AGG, 0);
	case NVML_FI_DEV_ECC_DBE_AGG_TOTAL: return number(c, f, ULL, A_ECC_UNCORRECTED_AGG, 0);
	case NVML_FI_DEV_RETIRED_SBE: return number(c, f, UINT, A_RETIRED_SBE, NONE);
	case NVML_FI_DEV_RETIRED_DBE: return number(c, f, UINT, A_RETIRED_DBE, NONE);
	case NVML_FI_DEV_RETIRED_PENDING: return number(c, f, UINT, A_RETIRED_PENDING, NONE);
	case NVML_FI_DEV_REMAPPED_COR: return number(c, f, UINT, A_REMAPPED_CORRECTED, 0);
	case NVML_FI_DEV_REMAPPED_UNC: return number(c, f, UINT, A_REMAPPED_UNCORRECTED, 0);
	case NVML_FI_DEV_REMAPPED_PENDING: return number(c, f, UINT, A_REMAP_PENDING, 0);
	case NVML_FI_DEV_REMAPPED_FAILURE: return number(c, f, UINT, A_REMAP_FAILURE, 0);
	case NVML_FI_DEV_NVLINK_LINK_COUNT: return number(c, f, UINT, A_NVLINKS, 0);
	case NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: return number(c, f, ULL, A_NVLINK_CRC, NONE);
	case NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: return number(c, f, ULL, A_NVLINK_REPLAY, NONE);
	case NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: return number(c, f, ULL, A_NVLINK_RECOVERY, NONE);
	case NVML_FI_DEV_MEMORY_TEMP: return number(c, f, UINT, A_MEM_TEMP, NONE);
	case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
		if (value_at(c->s, c->gpu, A_ENERGY, c->now).state == NOT_AVAILABLE)
			return NVML_ERROR_NOT_SUPPORTED;
		return put(f, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, energy_mj(c->s, c->gpu, c->now));
	case NVML_FI_DEV_PCIE_REPLAY_COUNTER: return number(c, f, UINT, A_PCIE_REPLAYS, 0);
	case NVML_FI_DEV_POWER_AVERAGE:
	case NVML_FI_DEV_POWER_INSTANT: return number(c, f, UINT, A_POWER, 70000);
	case NVML_FI_DEV_POWER_MIN_LIMIT: return number(c, f, UINT, A_POWER_MIN, 200000);
	case NVML_FI_DEV_POWER_MAX_LIMIT: return number(c, f, UINT, A_POWER_MAX, 700000);
	case NVML_FI_DEV_POWER_DEFAULT_LIMIT: return number(c, f, UINT, A_POWER_DEFAULT, 700000);
	case NVML_FI_DEV_POWER_CURRENT_LIMIT: return number(c, f, UINT, A_POWER_LIMIT, 700000);
	case NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT: return limit(c, f, A_TEMP_SHUTDOWN, 92);
	case NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: return limit(c, f, A_TEMP_SLOWDOWN, 89);
	case NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT: return limit(c, f, A_TEMP_MEM_MAX, 95);
	case NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT: return limit(c, f, A_TEMP_GPU_MAX, 87);
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: return number(c, f, UINT, A_RECOVERY, NONE);
	case NVML_FI_DEV_PERF_POLICY_POWER: return throttled(c, f, nvmlClocksEventReasonSwPowerCap);
	case NVML_FI_DEV_PERF_POLICY_THERMAL:
		return throttled(c, f, nvmlClocksThrottleReasonHwSlowdown | nvmlClocksThrottleReasonHwThermalSlowdown | nvmlClocksEventReasonSwThermalSlowdown);
	case NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: return throttled(c, f, nvmlClocksEventReasonSwThermalSlowdown);
	case NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: return throttled(c, f, nvmlClocksThrottleReasonHwThermalSlowdown);
	case NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: return throttled(c, f, nvmlClocksThrottleReasonHwPowerBrakeSlowdown);
	default: return NVML_ERROR_NOT_SUPPORTED;
	}
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	BEGIN(device, CARD_ONLY);
	NEED(values && count >= 0);
	for (int i = 0; i < count; i++) {
		values[i].timestamp = c.now;
		values[i].latencyUsec = 0;
		values[i].nvmlReturn = field(&c, &values[i]);
	}
	return NVML_SUCCESS;
}
