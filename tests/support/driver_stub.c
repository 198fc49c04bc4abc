/* NVIDIA's driver as far as the executor calls it, on host memory, to check how it is called. Launches are written to
   the file $DRIVER_STUB_LOG: grid, threads, shared memory, and the values of the parameters by their sizes. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
static int capturing;

R cuInit(unsigned flags) { return flags; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGetCount(int *n) { *n = 1; return 0; }
R cuDeviceGet(int *d, int i) { *d = i; return 0; }
R cuDeviceGetName(char *name, int n, int d) { snprintf(name, n, "stub GPU"); return d; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 8 : a == 76 ? 9 : a == 16 ? 58 : -1; return d; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; return d; }
R cuDevicePrimaryCtxRelease_v2(int d) { return d; }
R cuCtxSetCurrent(void *c) { return c == (void *)8 ? 0 : 201; }
R cuStreamCreate(void **s, unsigned flags) { *s = (void *)16; return flags == 1 ? 0 : 1; }
R cuStreamDestroy_v2(void *s) { return s == (void *)16 ? 0 : 400; }
R cuStreamSynchronize(void *s) { return capturing ? 900 : s == (void *)16 ? 0 : 400; }
R cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 1 << 30; *t = 1u << 31; return 0; }
R cuMemAlloc_v2(uint64_t *p, size_t n) {
  if (n > (1 << 30)) return 2;
  *p = (uint64_t)malloc(n);
  memset((void *)*p, 0xff, n);
  return 0;
}
R cuMemFree_v2(uint64_t p) { free((void *)p); return 0; }
R cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void *s) { memset((void *)p, v, n); return s ? 0 : 400; }
R cuMemHostAlloc(void **p, size_t n, unsigned flags) { *p = malloc(n); return flags; }
R cuMemFreeHost(void *p) { free(p); return 0; }
R cuMemcpyHtoDAsync_v2(uint64_t d, const void *h, size_t n, void *s) { memcpy((void *)d, h, n); return s ? 0 : 400; }
R cuMemcpyDtoHAsync_v2(void *h, uint64_t d, size_t n, void *s) { memcpy(h, (void *)d, n); return s ? 0 : 400; }
R cuModuleLoadData(void **m, const void *image) {
  *m = (void *)24;
  return strstr(image, ".entry") ? 0 : 218;
}
R cuModuleUnload(void *m) { return m == (void *)24 ? 0 : 1; }
R cuModuleGetFunction(void **f, void *m, const char *name) {
  *f = (void *)32;
  return m == (void *)24 && !strcmp(name, "kernel") ? 0 : 500;
}
R cuFuncSetAttribute(void *f, int a, int v) { return f == (void *)32 && a == 8 && v > 49152 ? 0 : 1; }
R cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                 void *s, void **params, void **extra) {
  FILE *log = fopen(getenv("DRIVER_STUB_LOG"), "a");
  fprintf(log, "%s%u,%u,%u %u,%u,%u %u %llu %d\n", capturing ? "captured " : "", gx, gy, gz, bx, by, bz, shared,
          (unsigned long long)*(uint64_t *)params[0], *(int32_t *)params[1]);
  fclose(log);
  return f == (void *)32 && s == (void *)16 && !extra ? 0 : 1;
}
R cuStreamBeginCapture_v2(void *s, int mode) { capturing = 1; return s && mode == 1 ? 0 : 1; }
R cuStreamEndCapture(void *s, void **g) { capturing = 0; *g = (void *)40; return s ? 0 : 1; }
R cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long flags) {
  *e = (void *)48;
  return g == (void *)40 && !flags ? 0 : 1;
}
R cuGraphDestroy(void *g) { return g == (void *)40 ? 0 : 1; }
R cuGraphExecDestroy(void *e) { return e == (void *)48 ? 0 : 1; }
R cuGraphLaunch(void *e, void *s) { return e == (void *)48 && s == (void *)16 ? 0 : 1; }
R cuGetErrorString(int code, const char **text) {
  *text = code == 2 ? "out of memory" : code == 218 ? "a PTX JIT compilation failed" : "another error";
  return 0;
}

#define ENTRY(name, function) if (!strcmp(symbol, name)) { *found = (void *)function; return 0; }
R cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
  if (status) *status = 0;
  ENTRY("cuInit", cuInit) ENTRY("cuDriverGetVersion", cuDriverGetVersion) ENTRY("cuDeviceGetCount", cuDeviceGetCount)
  ENTRY("cuDeviceGet", cuDeviceGet) ENTRY("cuDeviceGetName", cuDeviceGetName)
  ENTRY("cuDeviceGetAttribute", cuDeviceGetAttribute) ENTRY("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain)
  ENTRY("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2) ENTRY("cuCtxSetCurrent", cuCtxSetCurrent)
  ENTRY("cuStreamCreate", cuStreamCreate) ENTRY("cuStreamDestroy", cuStreamDestroy_v2)
  ENTRY("cuStreamSynchronize", cuStreamSynchronize) ENTRY("cuMemGetInfo", cuMemGetInfo_v2)
  ENTRY("cuMemAlloc", cuMemAlloc_v2) ENTRY("cuMemFree", cuMemFree_v2) ENTRY("cuMemsetD8Async", cuMemsetD8Async)
  ENTRY("cuMemHostAlloc", cuMemHostAlloc) ENTRY("cuMemFreeHost", cuMemFreeHost)
  ENTRY("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2) ENTRY("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2)
  ENTRY("cuModuleLoadData", cuModuleLoadData) ENTRY("cuModuleUnload", cuModuleUnload)
  ENTRY("cuModuleGetFunction", cuModuleGetFunction) ENTRY("cuFuncSetAttribute", cuFuncSetAttribute)
  ENTRY("cuLaunchKernel", cuLaunchKernel) ENTRY("cuStreamBeginCapture", cuStreamBeginCapture_v2)
  ENTRY("cuStreamEndCapture", cuStreamEndCapture) ENTRY("cuGraphInstantiate", cuGraphInstantiateWithFlags)
  ENTRY("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags) ENTRY("cuGraphDestroy", cuGraphDestroy)
  ENTRY("cuGraphExecDestroy", cuGraphExecDestroy) ENTRY("cuGraphLaunch", cuGraphLaunch)
  ENTRY("cuGetErrorString", cuGetErrorString)
  *found = NULL;
  if (status) *status = 1;
  return 0;
}
