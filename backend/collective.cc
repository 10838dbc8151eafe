#include "backend/collective.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace loadplan {
namespace {

bool StartsWithAny(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::ranges::any_of(prefixes, [&](std::string_view p) { return name.starts_with(p); });
}

// Nothing was sent, so nothing is waited for.
class NoWork : public c10d::Work {
 public:
  NoWork() { finish(); }
};

bool ReturnsWork(const c10::Argument& returned) {
  return returned.type()->str() == "__torch__.torch.classes.c10d.Work";
}

}  // namespace

bool IsCollective(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  if (name.starts_with("aten::")) return false;
  if (StartsWithAny(name,
                    {"c10d::", "_c10d_functional", "c10d_functional", "symm_mem::", "_dtensor::"}))
    return true;
  return std::ranges::any_of(op.schema().arguments(), [](const c10::Argument& argument) {
    return argument.name() == "group_name" || argument.name() == "process_group";
  });
}

bool OnlyWaits(const c10::OperatorHandle& op) {
  constexpr std::string_view kNames[] = {"c10d::barrier", "c10d::monitored_barrier_",
                                         "_c10d_functional::wait_tensor",
                                         "_c10d_functional::_wrap_tensor_autograd"};
  return std::ranges::find(kNames, op.operator_name().name) != std::end(kNames);
}

bool MayWrite(const c10::OperatorHandle& op, std::size_t position) {
  const c10::AliasInfo* const alias = op.schema().arguments()[position].alias_info();
  return (alias != nullptr && alias->isWrite()) || op.operator_name().name.starts_with("c10d::");
}

std::vector<c10::IValue> ReturnsOfNoExchange(const c10::FunctionSchema& schema,
                                             c10::ArrayRef<c10::IValue> arguments) {
  std::vector<c10::IValue> returned;
  for (const c10::Argument& value : schema.returns()) {
    if (ReturnsWork(value)) {
      returned.emplace_back(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<NoWork>()));
      continue;
    }
    // What is written comes first and is returned as it came.
    const auto same = std::ranges::find_if(schema.arguments(), [&](const c10::Argument& argument) {
      return *argument.type() == *value.type();
    });
    TORCH_CHECK_NOT_IMPLEMENTED(same != schema.arguments().end(), "`", schema.name(),
                                "` returns what no argument is");
    returned.push_back(arguments[static_cast<std::size_t>(same - schema.arguments().begin())]);
  }
  return returned;
}

}  // namespace loadplan
