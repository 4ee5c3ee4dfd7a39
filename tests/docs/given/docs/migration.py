# after: compat.install()
assert compat.installed()
compat.uninstall()
