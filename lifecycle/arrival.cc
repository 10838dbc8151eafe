#include "lifecycle/arrival.h"

#include <c10/core/DispatchKey.h>
#include <fnmatch.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"

namespace loadplan {
std::string_view KindProblem(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is undefined";
  if (tensor.key_set().has(c10::DispatchKey::Python)) {
    return "is a tensor subclass that hides its memory; send its plain (local) tensor";
  }
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) {
    return "is sparse, nested or quantised; send a plain strided tensor";
  }
  if (tensor.is_privateuseone()) return "is a trace tensor, which holds no data";
  return "";
}

absl::Status CheckDeclared(const SourceTensor& declared, const at::Tensor& tensor,
                           bool needs_memory) {
  const auto refuse = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("`", declared.name, "` ", what));
  };
  if (const std::string_view problem = KindProblem(tensor); !problem.empty()) {
    return refuse(std::string(problem));
  }
  absl::Status status = CheckDeclaredAs(declared, tensor.sizes(), tensor.scalar_type());
  if (!status.ok()) return status;
  if (needs_memory && tensor.is_meta()) return refuse("arrived on meta, where it holds no data");
  return absl::OkStatus();
}

absl::Status CheckDeclaredAs(const SourceTensor& declared, at::IntArrayRef shape,
                             at::ScalarType dtype) {
  const auto refuse = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", declared.name, "` arrived ", what,
                     "; send it as declared, or declare what is sent and plan again"));
  };
  const at::IntArrayRef expected(declared.shape.data(), declared.shape.size());
  if (shape != expected) {
    return refuse(absl::StrCat("with shape [", absl::StrJoin(shape, ", "), "], expected [",
                               absl::StrJoin(expected, ", "), "]"));
  }
  if (dtype != ToScalarType(declared.dtype)) {
    return refuse(absl::StrCat("as ", ToDType(dtype).name.data(), ", expected ",
                               std::string(declared.dtype.name)));
  }
  return absl::OkStatus();
}

bool MatchesPattern(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace loadplan
