// The Python module zinf_compile._csrc. The signatures are repeated in zinf_compile/_csrc.pyi.
//
// Ownership: Python owns every object returned; each is a copy that refers to nothing here.
// Threads: called with the GIL held; functions that may block release it.
#include <cerrno>
#include <exception>
#include <filesystem>

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "io/direct_io.hpp"
#include "io/io_uring_support.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Turns a failed system call into the OSError subclass that Python's own functions raise for its errno.
void raise_os_error(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::filesystem::filesystem_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path1().c_str());
    }
}

}  // namespace

NB_MODULE(_csrc, m) {
    nb::set_leak_warnings(false);  // at exit models in caches of PyTorch hold stores, and these an engine, which is closed by then
    m.doc() = "The native part of zinf-compile: its I/O engine, what that asks of the kernel, and the state of a generator.";
    zinf::bind_engine(m);
    zinf::bind_mt19937(m);
    nb::register_exception_translator(raise_os_error);

    nb::class_<zinf::IoUringSupport>(m, "IoUringSupport", "Whether this process may use io_uring, and if not, why.")
        .def_prop_ro("available", &zinf::IoUringSupport::available, "True if a ring could be set up.")
        .def_ro("errno", &zinf::IoUringSupport::error, "The error of io_uring_setup, 0 if available.")
        .def_ro("reason", &zinf::IoUringSupport::reason, "What the error means and what to do, empty if available.")
        .def("__repr__", [](const zinf::IoUringSupport& self) {
            return nb::str("IoUringSupport(available={}, errno={}, reason={!r})")
                .format(self.available(), self.error, self.reason);
        });
    m.def("io_uring_support", &zinf::io_uring_support,
          "Set up the smallest io_uring and close it again, to see whether this process may.");

    nb::class_<zinf::DirectIoAlignment>(m, "DirectIoAlignment",
                                        "What direct I/O on a file asks for, in bytes; 0 where it doesn't say.")
        .def_ro("memory", &zinf::DirectIoAlignment::memory, "Alignment of the buffer's address.")
        .def_ro("offset", &zinf::DirectIoAlignment::offset, "Alignment of the file offset and of the length.")
        .def("__repr__", [](const zinf::DirectIoAlignment& self) {
            return nb::str("DirectIoAlignment(memory={}, offset={})").format(self.memory, self.offset);
        });
    m.def("direct_io_alignment", &zinf::direct_io_alignment, "path"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Ask the filesystem how direct I/O on `path` must be aligned. Raises OSError with errno and path.");
}
