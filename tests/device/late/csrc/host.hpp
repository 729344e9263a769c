// What the host's own operators do to pinned memory, for the detector: PyTorch tells of each call, on whichever thread.
#pragma once

namespace late {

// From now on each operator of the CPU on pinned memory is a read or a write by the host. See Streams::host_access.
void watch_host();

}  // namespace late
