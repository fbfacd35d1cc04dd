package who

import "context"

// Viewer is who an answer is made for. The zero value is an unknown viewer,
// who sees nobody's command line.
type Viewer struct {
	uid   uint32
	known bool
}

// Peer is the viewer with this uid. The caller must have the uid from the
// kernel (its own, or the peer of a unix socket), never from what was sent.
func Peer(uid uint32) Viewer { return Viewer{uid: uid, known: true} }

// UID returns the viewer's uid, and whether it is known.
func (v Viewer) UID() (uint32, bool) { return v.uid, v.known }

// sees reports whether the viewer may see the command line of a process that
// belongs to uid; -1 is nobody's.
func (v Viewer) sees(uid int64) bool {
	return v.known && (v.uid == 0 || int64(v.uid) == uid)
}

type viewerKey struct{}

// WithViewer returns a context that carries the viewer of a request.
func WithViewer(ctx context.Context, v Viewer) context.Context {
	return context.WithValue(ctx, viewerKey{}, v)
}

// ViewerOf returns the viewer of a request; unknown if the context has none.
func ViewerOf(ctx context.Context) Viewer {
	v, _ := ctx.Value(viewerKey{}).(Viewer)
	return v
}
