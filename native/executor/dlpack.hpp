// The part of DLPack's C exchange interface (version 1.3) that replay needs: how to look at a framework's tensor without
// taking a reference, and how to get a new one. Layouts as published at dmlc.github.io/dlpack; checked by version.
#pragma once
#include <cstdint>

namespace outlast::dlpack {

struct Version {
    uint32_t major, minor;
};
struct Device {
    int32_t type, id;
};
struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct Managed {
    Version version;
    void* manager;
    void (*deleter)(Managed*);
    uint64_t flags;
    Tensor tensor;
};

constexpr int32_t cpu = 1;
enum Code : uint8_t { Int = 0, UInt = 1, Float = 2, BFloat = 4, Bool = 6 };

using SetError = void (*)(void* context, const char* kind, const char* message);

struct Exchange {
    Version version;
    Exchange* previous;
    int (*allocate)(Tensor* prototype, Managed** out, void* context, SetError set_error);
    int (*managed_from_object)(void* object, Managed** out);
    int (*object_from_managed)(Managed* tensor, void** out);  // takes the reference
    int (*view_of_object)(void* object, Tensor* out);
    int (*current_stream)(int32_t device, int32_t id, void** out);
};

}  // namespace outlast::dlpack
