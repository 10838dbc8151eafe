# Part of the installation of a wheel: Abseil and simdjson, copied beside `library`. As auditwheel
# does, for what a machine with torch may lack.
file(GET_RUNTIME_DEPENDENCIES
  LIBRARIES ${library}
  RESOLVED_DEPENDENCIES_VAR found
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_INCLUDE_REGEXES "^lib(absl_|simdjson)"
  PRE_EXCLUDE_REGEXES ".*")
if(missing)
  message(FATAL_ERROR "not found, needed by ${library}: ${missing}")
endif()
file(INSTALL ${found} DESTINATION ${CMAKE_INSTALL_PREFIX}/loadplan TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)
