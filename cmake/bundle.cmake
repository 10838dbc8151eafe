# Part of the installation of a wheel: Abseil's libraries, copied beside `library`. As auditwheel
# does, for the one kind of library that a machine with torch may lack.
file(GET_RUNTIME_DEPENDENCIES
  LIBRARIES ${library}
  RESOLVED_DEPENDENCIES_VAR found
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_INCLUDE_REGEXES "^libabsl_"
  PRE_EXCLUDE_REGEXES ".*")
if(missing)
  message(FATAL_ERROR "not found, needed by ${library}: ${missing}")
endif()
file(INSTALL ${found} DESTINATION ${CMAKE_INSTALL_PREFIX}/loadplan TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)
