"""HIP's runtime: libamdhip64.so, the driver's face on AMD's cards.

The oldest version is 5.7, which Debian and Ubuntu package: the first one whose graphs and virtual memory both work. HIP
counts 5.7.x as 507xxxxx.

What a card's arch is called stands in no attribute, only in the structure of all properties, whose form changed with
6.0: since then the function is hipGetDevicePropertiesR0600, 1472 bytes with gcnArchName at 1160; the older one has it
at 396. (Computed from hip_runtime_api.h of both; tinygrad's generated bindings give 1160 too.)
"""

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p

from backends.gpu.driver.names import Attributes, Names

NAMES = Names(
    vendor="amd",
    title="HIP",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"),
    oldest=50700000,
    oldest_text="5.7",
    hiding=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    attributes=Attributes(warp=87, units=63, integrated=16, virtual_memory=89),
    install="install ROCm's HIP runtime (Debian, Ubuntu: apt install libamdhip64-5 · Fedora: dnf install rocm-hip ·"
    " AMD's packages: hip-runtime-amd) and be in the groups render and video; in a container: --device /dev/kfd"
    " --device /dev/dri",
    update="update ROCm's HIP runtime to 5.7 or later",
    symbols={
        "init": "hipInit",
        "version": "hipRuntimeGetVersion",
        "error_name": "hipGetErrorName",
        "error_text": "hipGetErrorString",
        "device_count": "hipGetDeviceCount",
        "device_get": "hipDeviceGet",
        "device_name": "hipDeviceGetName",
        "device_uuid": "hipDeviceGetUuid",
        "device_pci": "hipDeviceGetPCIBusId",
        "device_attribute": "hipDeviceGetAttribute",
        "device_total": "hipDeviceTotalMem",
        "device_reaches": "hipDeviceCanAccessPeer",
        "device_set": "hipSetDevice",
        "memory_info": "hipMemGetInfo",
        "allocate": "hipMalloc",
        "free": "hipFree",
        "fill": "hipMemsetD8Async",
        "upload": "hipMemcpyHtoDAsync",
        "download": "hipMemcpyDtoHAsync",
        "copy": "hipMemcpyDtoDAsync",
        "host_register": "hipHostRegister",
        "host_unregister": "hipHostUnregister",
        "granularity": "hipMemGetAllocationGranularity",
        "reserve": "hipMemAddressReserve",
        "unreserve": "hipMemAddressFree",
        "create": "hipMemCreate",
        "release": "hipMemRelease",
        "map": "hipMemMap",
        "unmap": "hipMemUnmap",
        "set_access": "hipMemSetAccess",
        "load": "hipModuleLoadDataEx",
        "unload": "hipModuleUnload",
        "function": "hipModuleGetFunction",
        "launch": "hipModuleLaunchKernel",
        "stream_create": "hipStreamCreateWithFlags",
        "stream_wait": "hipStreamSynchronize",
        "stream_query": "hipStreamQuery",
        "stream_destroy": "hipStreamDestroy",
        "event_create": "hipEventCreateWithFlags",
        "event_record": "hipEventRecord",
        "event_wait": "hipEventSynchronize",
        "event_elapsed": "hipEventElapsedTime",
        "event_destroy": "hipEventDestroy",
        "capture_begin": "hipStreamBeginCapture",
        "capture_end": "hipStreamEndCapture",
        "instantiate": "hipGraphInstantiate",
        "graph_launch": "hipGraphLaunch",
        "graph_destroy": "hipGraphDestroy",
        "exec_destroy": "hipGraphExecDestroy",
        "ipc_get": "hipIpcGetMemHandle",
        "ipc_open": "hipIpcOpenMemHandle",
        "ipc_close": "hipIpcCloseMemHandle",
    },
    own={
        "error_name": (c_int,),
        "error_text": (c_int,),
        "device_set": (c_int,),
        "instantiate": (POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_char_p, c_size_t),
    },
)

PROPERTIES = ("hipGetDevicePropertiesR0600", 1160), ("hipGetDeviceProperties", 396)
"""(function, where gcnArchName begins), the newer one first: a library of 6.0 and later has both."""
PROPERTIES_BYTES = 4096
"""Room for whatever a later version adds."""
ARCH_BYTES = 256
