/* Keeps libvgpu.so from changing its process's umask.
 *
 * It calls umask(0) when CUDA or NVML is first used and never takes it back, so that all files a job writes from then
 * on could be written by anybody. Preloaded before it, this umask() is the one it finds. Everybody else's call goes to
 * the kernel as ever.
 *
 * gres-mig slices build FILE
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

mode_t umask(mode_t mask)
{
    Dl_info caller;
    const char *library = getenv("CUDA_REDIRECT");

    if (mask == 0 && library && dladdr(__builtin_return_address(0), &caller) && caller.dli_fname &&
        strcmp(caller.dli_fname, library) == 0)
        return 0;
    return (mode_t)syscall(SYS_umask, mask);
}
