// Python bindings of the I/O engine, wrapped by zinf_compile/runtime/storage/engine.py.
//
// Ownership: Python owns engines and pendings. Memory is passed as an address, which engine.py keeps alive.
// Threads: called with the GIL held; what may block releases it. No I/O thread ever takes the GIL.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "checksum/crc32c.hpp"
#include "io/engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zinf {
namespace {

constexpr std::chrono::milliseconds between_signals{100};

// A view of a Python buffer.
class BufferView {
public:
    BufferView(nb::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) nb::raise_python_error();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(view_.buf); }

private:
    Py_buffer view_{};
};

Kind kind_of(const std::string& name) {
    if (name == "auto") return Kind::automatic;
    if (name == "io_uring") return Kind::io_uring;
    if (name == "threads") return Kind::threads;
    throw nb::value_error(("engine is \"auto\", \"io_uring\" or \"threads\", not \"" + name + "\"").c_str());
}

// Waits with the GIL released, looking for signals such as Ctrl-C from time to time. Says whether the transfer is over.
bool wait(const Pending& pending, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        {
            const nb::gil_scoped_release released;
            if (pending.wait_for(std::clamp(left, std::chrono::milliseconds(0), between_signals))) return true;
        }
        if (PyErr_CheckSignals() != 0) nb::raise_python_error();
        if (Clock::now() >= until) return false;
    }
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const Closed& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const Forked& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const std::system_error& error) {
        const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::register_exception_translator(translate);

    nb::class_<Outcome>(m, "Outcome", "What came of a transfer.")
        .def_ro("error", &Outcome::error, "An errno, 0 if every byte was moved.")
        .def_ro("ended", &Outcome::ended, "True if the error is that the file ended early.")
        .def_ro("failed_at", &Outcome::failed_at, "Where in the file it failed, in bytes.")
        .def_ro("moved", &Outcome::moved, "Bytes moved.")
        .def_ro("checksum", &Outcome::checksum, "CRC32C of the bytes, if it was asked for and nothing failed.")
        .def_ro("began", &Outcome::began, "When the first of it was given to the drive, in seconds of `time.perf_counter`.")
        .def_ro("over", &Outcome::over, "When the last of it was over.");

    nb::class_<Counters>(m, "Counters", "What an engine did so far.")
        .def_ro("bytes_read", &Counters::bytes_read, "Bytes read, in transfers done or under way.")
        .def_ro("bytes_written", &Counters::bytes_written, "Bytes written, in transfers done or under way.")
        .def_ro("requests", &Counters::requests, "Transfers submitted.")
        .def_ro("in_flight", &Counters::in_flight, "Transfers that aren't done.");

    nb::class_<Pending>(m, "Pending", "A submitted transfer.")
        .def_prop_ro("number", &Pending::number, "The engine's count of transfers when this one was submitted.")
        .def("done", &Pending::done, "Whether it is over.")
        .def("wait", &wait, "seconds"_a, "Wait for so long; the GIL is released. Return whether it is over.")
        .def("outcome", &Pending::outcome, "What came of it, once it is over.");

    nb::class_<Engine>(m, "Engine", "The asynchronous I/O engine.")
        .def(
            "__init__",
            [](Engine* self, const std::string& kind, unsigned depth, std::size_t chunk_bytes, double bandwidth) {
                new (self) Engine({.kind = kind_of(kind), .depth = depth, .chunk_bytes = chunk_bytes, .bandwidth = bandwidth});
            },
            "engine"_a, "depth"_a, "chunk_bytes"_a, "bandwidth"_a)
        .def_prop_ro(
            "name", [](const Engine& self) { return self.kind() == Kind::io_uring ? "io_uring" : "threads"; },
            "The engine chosen: \"io_uring\" or \"threads\".")
        .def_prop_ro("reason", &Engine::reason, "Why io_uring was refused; empty if it wasn't.")
        .def_prop_ro("broken", &Engine::broken, "The errno with which io_uring refused to go on: now threads do. 0 if it didn't.")
        .def_prop_ro("forked", &Engine::forked, "True in a forked child of the process that made it.")
        .def(
            "submit",
            [](Engine& self, bool write, int fd, std::uint64_t offset, std::uintptr_t address, std::size_t bytes,
               std::size_t alignment, bool checksum) {
                return self.submit({.write = write,
                                    .fd = fd,
                                    .offset = offset,
                                    .address = reinterpret_cast<std::byte*>(address),
                                    .bytes = bytes,
                                    .alignment = alignment,
                                    .checksum = checksum});
            },
            nb::kw_only(), "write"_a, "fd"_a, "offset"_a, "address"_a, "bytes"_a, "alignment"_a, "checksum"_a,
            nb::call_guard<nb::gil_scoped_release>(),
            "Start a transfer. The caller keeps memory and descriptor until it is over. Raises ValueError once closed.")
        .def("take_finished", &Engine::take_finished, "Numbers of the transfers that finished since the last call.")
        .def("counters", &Engine::counters, "What was done so far.")
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>(), "Wait for everything submitted, and end.");

    m.def(
        "address_of", [](nb::handle buffer, bool writable) { return BufferView(buffer, writable).address(); }, "buffer"_a,
        "writable"_a, "The address of a contiguous buffer. Raises BufferError if it can't be given.");
    m.def(
        "crc32c_at",
        [](std::uintptr_t address, std::size_t bytes, std::uint32_t value) {
            return crc32c({reinterpret_cast<const std::byte*>(address), bytes}, value);
        },
        "address"_a, "bytes"_a, "value"_a = 0, nb::call_guard<nb::gil_scoped_release>(), 
        "The CRC32C of what `value` is the CRC32C of, followed by the bytes at an address.");
    m.def("crc32c_combine", &crc32c_combine, "first"_a, "second"_a, "second_bytes"_a,
          "The CRC32C of two runs of bytes put together, from the CRC32C of each and the second one's length.");
}

}  // namespace zinf
