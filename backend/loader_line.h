// Where the loader is: a part of the reasons that people read.
#ifndef LOADPLAN_BACKEND_LOADER_LINE_H_
#define LOADPLAN_BACKEND_LOADER_LINE_H_

#include <string>

namespace loadplan {

// `model.py:12`, the innermost line of the loader's own code in this thread, as the host's
// implementation of the operator `loadplan::loader_line` tells it; "" where there is none.
// Refusals that the loader catches have theirs as well. Call it without a lock.
std::string LoaderLine();

// " at model.py:12", or "".
inline std::string AtLine(const std::string& line) { return line.empty() ? "" : " at " + line; }

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_LOADER_LINE_H_
