package owner

import "testing"

// BenchmarkResolve is what every process costs whenever a name may have
// changed.
func BenchmarkResolve(b *testing.B) {
	c := DefaultConfig()
	c.Accounts = town()
	for name, e := range map[string]Evidence{
		"session": process(1001, inSlice(1001)), "container": container(0, label("owner", "alice"), called("alice-train"), bound(0, "/srv/x")),
		"nobody": container(0, called("train"), bound(0, "/srv/data/x")),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Resolve(e, c)
			}
		})
	}
}
