// Package report writes statements: as CSV for spreadsheets and finance
// systems, as JSON for programs and as a table for people.
package report

import (
	"time"

	"gpuledger/accounting/billing"
)

// Column is one column of the monthly CSV.
type Column struct {
	Name string
	// Text columns hold names or words; a cell that a spreadsheet could take
	// for a formula is neutralised there. All others hold plain decimals.
	Text bool
	cell func(row) string
}

// row is what a cell is made from.
type row struct {
	statement *billing.Statement
	line      *billing.Line
}

// Columns are the columns of the monthly CSV, in order. The header is part of
// the contract: columns keep their names and places.
var Columns = []Column{
	text("period", func(r row) string { return r.statement.Period.Name }),
	text("period_start", func(r row) string { return r.statement.Period.Start.Format(time.RFC3339) }),
	text("period_end", func(r row) string { return r.statement.Period.End.Format(time.RFC3339) }),
	text("timezone", func(r row) string { return r.statement.Period.Location.String() }),
	text("status", func(r row) string { return r.statement.Status }),
	text("line_id", func(r row) string { return r.line.ID }),
	text("line_type", func(r row) string { return string(r.line.Type) }),
	text("account", func(r row) string { return r.line.Account }),
	text("project", func(r row) string { return r.line.Project }),
	text("cost_centre", func(r row) string { return r.line.CostCentre }),
	text("user", func(r row) string { return r.line.User }),
	text("node", func(r row) string { return r.line.Node }),
	text("gpu_model", func(r row) string { return r.line.Model }),
	text("mig_profile", func(r row) string { return r.line.Profile }),
	text("item", func(r row) string { return r.line.Item }),
	text("tariff", empty),
	text("class", func(r row) string { return r.line.Class }),
	hours("gpu_hours", always, func(h *billing.Hours) billing.Micro { return h.GPUHours }),
	hours("held_hours", metered, func(h *billing.Hours) billing.Micro { return h.HeldHours }),
	hours("active_hours", (*billing.Hours).ActivityKnown, func(h *billing.Hours) billing.Micro { return h.ActiveHours }),
	hours("idle_hours", (*billing.Hours).ActivityKnown, func(h *billing.Hours) billing.Micro { return h.IdleHours }),
	hours("reserved_hours", metered, func(h *billing.Hours) billing.Micro { return h.ReservedHours }),
	hours("memory_gib_hours", (*billing.Hours).MemoryKnown, func(h *billing.Hours) billing.Micro { return h.MemoryGiBHours }),
	hours("energy_kwh", metered, func(h *billing.Hours) billing.Micro { return h.EnergyKWh }),
	charge("quantity", false, func(r row) string { return r.line.Charge.Quantity.String() }),
	charge("unit", true, func(r row) string { return r.line.Charge.Unit }),
	charge("unit_price", false, func(r row) string { return r.line.UnitPrice }),
	charge("list_amount", false, func(r row) string { return r.line.Charge.ListAmount.Decimal(r.statement.Currency) }),
	charge("amount", false, func(r row) string { return r.line.Charge.Amount.Decimal(r.statement.Currency) }),
	charge("currency", true, func(r row) string { return r.statement.Currency.Code }),
	{Name: "coverage", cell: func(r row) string { return r.line.Coverage.Decimal() }},
	text("corrects_period", empty),
	text("corrects_line_id", empty),
}

func text(name string, cell func(row) string) Column {
	return Column{Name: name, Text: true, cell: cell}
}

// hours is a column of lines that carry hours; a figure that is not known is
// an empty cell, never zero.
func hours(name string, known func(*billing.Hours) bool, value func(*billing.Hours) billing.Micro) Column {
	return Column{Name: name, cell: func(r row) string {
		if r.line.Hours == nil || !known(r.line.Hours) {
			return ""
		}
		return value(r.line.Hours).String()
	}}
}

// charge is a column of lines that carry money.
func charge(name string, text bool, cell func(row) string) Column {
	return Column{Name: name, Text: text, cell: func(r row) string {
		if r.line.Charge == nil {
			return ""
		}
		return cell(r)
	}}
}

func empty(row) string { return "" }

func always(*billing.Hours) bool { return true }

func metered(h *billing.Hours) bool { return h.Metered }
