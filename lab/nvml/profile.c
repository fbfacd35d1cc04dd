/* Compiled once per driver profile; see the Makefile. */
#include "lab.h"

const char *const profile_driver = PROFILE_DRIVER;
const int profile_cuda = PROFILE_CUDA;
const unsigned profile_process_info_v3_size = PROFILE_PROCESS_INFO_V3_SIZE;
